"""Each kind of model becomes a bundle whose answers are those of its own library."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional
from transformers import (
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForObjectDetection,
    AutoModelForSemanticSegmentation,
    AutoTokenizer,
    PoolFormerImageProcessorPil,
    WhisperForConditionalGeneration,
    pipeline,
)

from pipeline.cli.export import export_source
from pipeline.contract.bundle import open_bundle
from pipeline.contract.golden import difference
from pipeline.contract.task import load_class
from pipeline.given.sources import Request, write_project
from pipeline.history import example_folder
from pipeline.system.errors import ConfigError, InvalidPayload
from serve.runtime.predictor import Predictor
from serve.runtime.session import Session

from .folders import (
    RATE,
    make_detector,
    make_language_model,
    make_picture,
    make_segmenter,
    make_sound,
    make_spectrogram_transformer,
    make_wav2vec,
    make_whisper,
    picture_instance,
    wav_instance,
)
from .test_sentence_transformers import LONGEST, TEXTS, make_folder

pytestmark = pytest.mark.long  # each makes a bundle


def export(source: Path, tmp_path: Path) -> Predictor:
    bundle = open_bundle(export_source(str(source), tmp_path / "project", "", []).bundle_path)
    return Predictor(bundle, Session(bundle))


def assert_equal(answers: Any, expected: Any) -> None:
    assert difference(expected, list(answers), 1e-3, 1e-4) is None, f"{answers} and {expected}"


def test_vectors_are_those_of_each_text_alone(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "model", {"pooling_mode": "mean"})
    predictor = export(source, tmp_path)
    model = AutoModel.from_pretrained(source / "0_Transformer")
    tokenizer = AutoTokenizer.from_pretrained(source / "0_Transformer")
    with torch.no_grad():
        for text, vector in zip(TEXTS, predictor.predict(TEXTS), strict=True):
            ids = tokenizer(text, truncation=True, max_length=LONGEST, return_tensors="pt")["input_ids"]
            expected = functional.normalize(model(ids).last_hidden_state[0].mean(dim=0), dim=0)
            np.testing.assert_allclose(vector, expected, atol=1e-4)
    assert predictor.embedding_sizes == ()


def test_whisper_writes_what_generate_writes(tmp_path: Path) -> None:
    source = make_whisper(tmp_path / "model")
    predictor = export(source, tmp_path)
    sounds = [make_sound(seconds, seed) for seed, seconds in enumerate((0.4, 1, 0.7))]
    extractor, tokenizer = AutoFeatureExtractor.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    features = extractor(sounds, sampling_rate=RATE, return_tensors="pt").input_features
    tokens = WhisperForConditionalGeneration.from_pretrained(source).generate(features, max_new_tokens=21)
    texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    assert len(set(texts)) == len(texts)
    assert_equal(predictor.predict([wav_instance(sound) for sound in sounds]), [{"text": text} for text in texts])
    with pytest.raises(InvalidPayload, match="must have 16 bits, 16000 Hz, at least 1 samples and at most 1 seconds"):
        predictor.predict([wav_instance(sounds[0], rate=8000)])


@pytest.mark.parametrize("task", ["automatic-speech-recognition", "audio-classification"])
def test_wav2vec_answers_as_the_pipeline(tmp_path: Path, task: str) -> None:
    source = make_wav2vec(tmp_path / "model", task == "automatic-speech-recognition")
    predictor = export(source, tmp_path)
    sounds = [make_sound(seconds, seed) for seed, seconds in enumerate((0.5, 2, 1.3))]
    options = {"top_k": 5} if task == "audio-classification" else {}
    library = pipeline(task, model=str(source))
    expected = library([{"raw": sound, "sampling_rate": RATE} for sound in sounds], **options)
    assert_equal(predictor.predict([wav_instance(sound) for sound in sounds]), list(expected))


def test_spectrogram_transformer_answers_as_the_pipeline(tmp_path: Path) -> None:
    source = make_spectrogram_transformer(tmp_path / "model")
    predictor = export(source, tmp_path)
    sounds = [make_sound(seconds, seed) for seed, seconds in enumerate((0.5, 1.28, 3))]  # padded, full and cut
    expected = pipeline("audio-classification", model=str(source))(sounds, top_k=5)
    assert_equal(predictor.predict([wav_instance(sound) for sound in sounds]), list(expected))


def test_segmenter_gives_the_class_of_each_pixel(tmp_path: Path) -> None:
    source = make_segmenter(tmp_path / "model")
    predictor = export(source, tmp_path)
    pictures = [make_picture(120, 90), make_picture(41, 150)]
    model = AutoModelForSemanticSegmentation.from_pretrained(source)
    processor = AutoImageProcessor.from_pretrained(source, backend="pil")
    for picture, answer in zip(pictures, predictor.predict([*map(picture_instance, pictures)]), strict=True):
        with torch.no_grad():
            outputs = model(**processor(picture, return_tensors="pt"))
        expected = processor.post_process_semantic_segmentation(outputs, [picture.size[::-1]])[0].numpy()
        classes = np.repeat(answer["values"], answer["lengths"]).reshape(answer["height"], answer["width"])
        assert np.mean(classes == expected) > 0.999  # two classes of a pixel may be nearly equal
        assert len(answer["classes"]) == len(set(classes.flat)) > 1
        shares = {row["label"]: row["share"] for row in answer["classes"]}
        assert shares["sky"] == np.mean(classes == 1)


@pytest.mark.parametrize("kind", ["detr", "yolos"])
def test_detector_finds_the_boxes_of_transformers(tmp_path: Path, kind: str) -> None:
    source = make_detector(tmp_path / "model", kind)
    predictor = export(source, tmp_path)
    pictures = [make_picture(120, 90), make_picture(64, 150)]
    model = AutoModelForObjectDetection.from_pretrained(source)
    processor = AutoImageProcessor.from_pretrained(source, backend="pil")
    for picture, answer in zip(pictures, predictor.predict([*map(picture_instance, pictures)]), strict=True):
        with torch.no_grad():
            outputs = model(**processor(picture, return_tensors="pt"))
        expected = processor.post_process_object_detection(outputs, 0.5, [picture.size[::-1]])[0]
        assert len(answer) == len(expected["scores"]) > 0
        np.testing.assert_allclose([thing["score"] for thing in answer], expected["scores"], atol=1e-4)
        np.testing.assert_allclose([list(thing["box"].values()) for thing in answer], expected["boxes"], atol=0.02)
        assert [thing["label"] for thing in answer] == [model.config.id2label[int(i)] for i in expected["labels"]]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_language_model_continues_as_generate(tmp_path: Path, kind: str) -> None:
    source = make_language_model(tmp_path / "model", kind)
    predictor = export(source, tmp_path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    texts = ["A cat", "The weather today is"]
    for text, answer in zip(texts, predictor.predict(texts), strict=True):
        ids = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        assert answer["token"] == model.generate(**ids, max_new_tokens=1, do_sample=False)[0, -1]
    assert (predictor.bundle.path / "files" / "tokenizer.json").is_file()
    assert predictor.signature.generation is not None


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"model_type": "bert", "architectures": ["BertModel"]}, "for embeddings, a folder needs modules.json"),
        ({"model_type": "parakeet_ctc", "architectures": ["ParakeetForCTC"]}, "ParakeetForCTC is not supported"),
        ({"model_type": "bart", "architectures": ["BartForConditionalGeneration"]}, "is not supported; supported are"),
    ],
)
def test_unsupported_architecture_is_one_sentence(tmp_path: Path, config: Any, sentence: str) -> None:
    source = make_wav2vec(tmp_path / "model", False)
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        write_project(Request(str(source), str(tmp_path), "name"))


@pytest.mark.parametrize("size", [(83, 71), (70, 61), (50, 64)], ids=str)
def test_middle_of_a_picture_is_that_of_transformers(size: tuple[int, int]) -> None:
    """Half of an odd margin is cut; torchvision rounds it."""
    fit = load_class("pictures.py:fit_picture", example_folder("given/images"))
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8))
    processor = PoolFormerImageProcessorPil(do_resize=False, crop_size={"height": 64, "width": 64})
    steps = {**processor.to_dict(), "image_processor_type": "PoolFormerImageProcessor"}
    cropped = processor.center_crop(np.asarray(picture).transpose(2, 0, 1), processor.crop_size)
    np.testing.assert_array_equal(np.asarray(fit(picture, steps)).transpose(2, 0, 1), cropped)
