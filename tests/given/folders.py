"""Folders of tiny models of transformers with random weights, as save_pretrained writes them."""

from __future__ import annotations

import base64
import io
import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    ASTConfig,
    ASTFeatureExtractor,
    ASTForAudioClassification,
    DetrConfig,
    DetrForObjectDetection,
    DetrImageProcessor,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    ResNetConfig,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    SegformerImageProcessor,
    Wav2Vec2Config,
    Wav2Vec2CTCTokenizer,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2ForCTC,
    Wav2Vec2ForSequenceClassification,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizerFast,
    YolosConfig,
    YolosForObjectDetection,
    YolosImageProcessor,
)

RATE = 16000
_END, _START, _ENGLISH, _GERMAN, _TIMELESS = range(256, 261)
_MARKS = ("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|notimestamps|>")


def _bytes_tokenizer(*marks: str) -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate((*letters, *marks))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def make_whisper(folder: Path) -> Path:
    """Write one that detects the language, and may not write some tokens."""
    torch.manual_seed(0)
    ids = {"decoder_start_token_id": _START, "eos_token_id": _END, "pad_token_id": _END, "bos_token_id": _END}
    config = WhisperConfig(
        vocab_size=261, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=16, max_source_positions=50,
        max_target_positions=32, init_std=0.4, suppress_tokens=[], begin_suppress_tokens=[], **ids,
    )  # fmt: skip
    model: Any = WhisperForConditionalGeneration(config)
    languages = {"<|en|>": _ENGLISH, "<|de|>": _GERMAN}
    model.generation_config = GenerationConfig(
        max_length=24, lang_to_id=languages, no_timestamps_token_id=_TIMELESS, is_multilingual=True,
        suppress_tokens=[3, 5, 7], begin_suppress_tokens=[20, _END], return_timestamps=False, **ids,
    )  # fmt: skip
    model.save_pretrained(folder)
    end = dict.fromkeys(("unk_token", "bos_token", "eos_token"), _MARKS[0])
    tokenizer = WhisperTokenizerFast(tokenizer_object=_bytes_tokenizer(*_MARKS), **end)
    tokenizer.add_special_tokens({"additional_special_tokens": list(_MARKS[1:])})
    tokenizer.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=16, chunk_length=1).save_pretrained(folder)
    return folder


def make_wav2vec(folder: Path, writes_text: bool) -> Path:
    torch.manual_seed(0)
    words = ["<pad>", "<s>", "</s>", "<unk>", "|", *"ABCDEFGHIJ"]
    config = Wav2Vec2Config(
        vocab_size=len(words), pad_token_id=0, num_labels=7, hidden_size=16, num_hidden_layers=1,
        num_attention_heads=2, intermediate_size=24, conv_dim=(8, 8, 8), conv_stride=(10, 8, 4),
        conv_kernel=(20, 8, 4), num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2,
        initializer_range=0.5 if writes_text else 0.1,
    )  # fmt: skip
    (Wav2Vec2ForCTC if writes_text else Wav2Vec2ForSequenceClassification)(config).save_pretrained(folder)
    Wav2Vec2FeatureExtractor().save_pretrained(folder)
    if writes_text:
        (folder / "words.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
        Wav2Vec2CTCTokenizer(str(folder / "words.json")).save_pretrained(folder)
    return folder


def make_spectrogram_transformer(folder: Path) -> Path:
    torch.manual_seed(0)
    sizes = {"max_length": 128, "num_mel_bins": 64}
    config = ASTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, initializer_range=0.3,
        num_labels=6, **sizes,
    )  # fmt: skip
    ASTForAudioClassification(config).save_pretrained(folder)
    ASTFeatureExtractor(**sizes).save_pretrained(folder)
    return folder


def make_segmenter(folder: Path) -> Path:
    torch.manual_seed(0)
    config = SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[4, 2], hidden_sizes=[8, 16], patch_sizes=[7, 3], strides=[4, 2],
        num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=16, initializer_range=0.5,
        id2label={0: "wall", 1: "sky", 2: "tree"}, label2id={"wall": 0, "sky": 1, "tree": 2},
    )  # fmt: skip
    SegformerForSemanticSegmentation(config).save_pretrained(folder)
    SegformerImageProcessor(size={"height": 64, "width": 64}).save_pretrained(folder)
    return folder


def make_detector(folder: Path, kind: str) -> Path:
    torch.manual_seed(2)  # with which it finds something
    labels = {"id2label": {0: "cat", 1: "dog", 2: "cup"}, "label2id": {"cat": 0, "dog": 1, "cup": 2}}
    size = {"shortest_edge": 48, "longest_edge": 80}
    if kind == "yolos":
        config = YolosConfig(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=[48, 64],
            patch_size=8, num_detection_tokens=6, initializer_range=0.5, **labels,
        )  # fmt: skip
        YolosForObjectDetection(config).save_pretrained(folder)
        YolosImageProcessor(size=size).save_pretrained(folder)
        return folder
    backbone = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    config = DetrConfig(
        backbone_config=backbone, use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, d_model=16,
        encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24,
        decoder_ffn_dim=24, num_queries=6, init_std=0.5, init_xavier_std=3.0, **labels,
    )  # fmt: skip
    DetrForObjectDetection(config).save_pretrained(folder)
    DetrImageProcessor(size=size).save_pretrained(folder)
    return folder


def make_language_model(folder: Path, kind: str) -> Path:
    torch.manual_seed(0)
    sizes = {"vocab_size": 257, "eos_token_id": 256, "bos_token_id": 256, "initializer_range": 0.4}
    if kind == "gpt2":
        GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=128, **sizes)).save_pretrained(folder)
    else:
        config = LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=128, **sizes,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(folder)
    end = {"eos_token": "<|end|>", "bos_token": "<|end|>"}
    PreTrainedTokenizerFast(tokenizer_object=_bytes_tokenizer("<|end|>"), **end).save_pretrained(folder)
    return folder


def make_sound(seconds: float, seed: int = 7) -> np.ndarray[Any, Any]:
    """Return a tone and noise, as a file of 16 bits holds them."""
    rng, time = np.random.default_rng(seed), np.arange(int(seconds * RATE)) / RATE
    sound = 0.4 * np.sin(2 * np.pi * 300 * time) * np.sin(5 * time) + rng.normal(0, 0.02, len(time))
    return (sound * 32767).astype("<i2") / np.float32(32768)


def wav_instance(sound: np.ndarray[Any, Any], rate: int = RATE) -> dict[str, str]:
    file = io.BytesIO()
    with wave.open(file, "wb") as recording:
        recording.setnchannels(1)
        recording.setsampwidth(2)
        recording.setframerate(rate)
        recording.writeframes((sound * 32768).astype("<i2").tobytes())
    return {"b64": base64.b64encode(file.getvalue()).decode()}


def make_picture(width: int, height: int) -> Image.Image:
    y, x = np.mgrid[:height, :width][..., None] / np.array([7, 20, 45])
    return Image.fromarray((127 + 90 * np.sin(x + width) * np.cos(y)).astype(np.uint8))


def picture_instance(picture: Image.Image) -> dict[str, str]:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return {"b64": base64.b64encode(file.getvalue()).decode()}
