"""A folder of sentence-transformers becomes a project whose vectors are those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch.nn import functional
from transformers import AutoModel, BertConfig, BertModel

from pipeline.contract.codec import embedding_sizes, load_codec
from pipeline.contract.config import load_config
from pipeline.contract.task import load_task
from pipeline.given.sources import Request, read_sentence_transformer, write_project
from pipeline.system.errors import ConfigError, InvalidPayload

TEXTS = ["Yes", "A dog runs across the meadow.", "a very long text, " * 9]
LONGEST = 24
TYPES = "sentence_transformers.models"


def make_folder(folder: Path, pooling: dict[str, Any], kinds: tuple[str, ...] = ("Pooling", "Normalize")) -> Path:
    """Write a tiny BERT with random weights, whose encoder is in a folder of its own."""
    encoder = folder / "0_Transformer"
    encoder.mkdir(parents=True)
    letters = "abcdefghijklmnopqrstuvwxyz,."
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *letters, *(f"##{letter}" for letter in letters)]
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = BertConfig(vocab_size=len(words), max_position_embeddings=32, initializer_range=0.3, **sizes)
    BertModel(config).save_pretrained(encoder)
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(encoder / "tokenizer.json"))
    settings = {"max_seq_length": LONGEST, "do_lower_case": False}
    (encoder / "sentence_bert_config.json").write_text(json.dumps(settings))
    modules = [{"path": "0_Transformer", "type": f"{TYPES}.Transformer"}]
    for number, kind in enumerate(kinds, start=1):
        modules.append({"path": f"{number}_{kind}", "type": f"{TYPES}.{kind}"})
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 16, **pooling}))
    return folder


def init(project: Path, source: Path) -> None:
    project.mkdir()
    write_project(Request(str(source), str(project), project.name))


def pooled(hidden: torch.Tensor, mode: str) -> torch.Tensor:
    """Pool the tokens of one text, which has no padding."""
    positions = torch.arange(1, len(hidden) + 1)[:, None]
    vectors: dict[str, torch.Tensor] = {
        "cls": hidden[0],
        "max": hidden.amax(dim=0),
        "mean": hidden.mean(dim=0),
        "mean_sqrt_len_tokens": hidden.sum(dim=0) / len(hidden) ** 0.5,
        "weightedmean": (hidden * positions).sum(dim=0) / positions.sum(),
        "lasttoken": hidden[-1],
    }
    return vectors[mode]


@pytest.mark.parametrize(
    ("pooling", "modes", "normalizes"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, ("cls", "mean"), True),
        ({"pooling_mode_max_tokens": True, "pooling_mode_lasttoken": True}, ("max", "lasttoken"), False),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, ("mean_sqrt_len_tokens",), False),
        ({"pooling_mode": "weightedmean"}, ("weightedmean",), True),
    ],
)
def test_vectors_of_a_padded_batch_are_those_of_transformers(
    tmp_path: Path, pooling: dict[str, Any], modes: tuple[str, ...], normalizes: bool
) -> None:
    source = make_folder(tmp_path / "source", pooling, ("Pooling", "Normalize") if normalizes else ("Pooling",))
    init(tmp_path / "search", source)
    config = load_config(tmp_path / "search" / "pipe.yaml")
    encoder = source / "0_Transformer"
    assert (config.name, config.model.pretrained) == ("search", str(encoder))

    task: Any = load_task(config.task, tmp_path / "search", trains=False)
    task.make_files(encoder)  # prepare has copied the encoder's small files before
    task.use_files(encoder)
    model = task.adapt(encoder).eval()
    weights = {f"encoder.{name}": value for name, value in load_file(encoder / "model.safetensors").items()}
    model.load_state_dict(weights)
    codec = load_codec(config.codec, tmp_path / "search", files=encoder)
    arrays = codec.decode(TEXTS)
    reference, tokenizer = (
        AutoModel.from_pretrained(encoder).eval(),
        Tokenizer.from_file(str(encoder / "tokenizer.json")),
    )
    tokenizer.enable_truncation(LONGEST)
    assert embedding_sizes(codec, config.codec) == ()
    by_ids = codec.decode([tokenizer.encode(text.strip()).ids for text in TEXTS])
    assert {name: array.tolist() for name, array in by_ids.items()} == {
        name: array.tolist() for name, array in arrays.items()
    }
    for ids in ([], [-1], [True], [10**9], ["1"]):
        with pytest.raises(InvalidPayload, match="instances: token ids must be whole numbers from 0 to"):
            codec.decode([ids])
    with torch.no_grad():
        outputs = model(*(torch.from_numpy(arrays[name]) for name in task.inputs))
        answers = zip(codec.encode({"vectors": outputs.numpy()}), task.reference(TEXTS, model), TEXTS, strict=True)
        for vector, answer, text in answers:
            np.testing.assert_allclose(vector, answer, atol=1e-5)
            hidden = reference(torch.tensor([tokenizer.encode(text.strip()).ids])).last_hidden_state[0]
            expected = torch.cat([pooled(hidden, mode) for mode in modes])
            np.testing.assert_allclose(
                vector, functional.normalize(expected, dim=0) if normalizes else expected, atol=1e-5
            )


def test_length_of_newer_folders_is_in_the_tokenizer(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "source", {"pooling_mode": "mean"})
    (source / "0_Transformer" / "sentence_bert_config.json").write_text("{}")
    (source / "0_Transformer" / "tokenizer_config.json").write_text('{"model_max_length": 20}')
    assert read_sentence_transformer(source)[1]["longest"] == 20


@pytest.mark.parametrize(
    ("file", "text", "sentence"),
    [
        (
            "modules.json",
            json.dumps([{"path": "", "type": f"{TYPES}.CLIPModel"}]),
            "the module CLIPModel is not supported",
        ),
        (
            "modules.json",
            json.dumps([{"path": "..", "type": f"{TYPES}.Transformer"}] * 2),
            "needs the modules Transformer",
        ),
        ("1_Pooling/config.json", '{"pooling_mode": "attention"}', "pooling attention is not supported"),
        ("0_Transformer/sentence_bert_config.json", "{}", "set max_seq_length"),
        ("0_Transformer/config.json", '{"model_type": "t5"}', "the model type t5 is not supported"),
        ("config_sentence_transformers.json", '{"default_prompt_name": "query"}', "the default prompt 'query'"),
    ],
)
def test_unsupported_folder_is_an_error_and_writes_nothing(tmp_path: Path, file: str, text: str, sentence: str) -> None:
    source = make_folder(tmp_path / "source", {"pooling_mode": "mean"})
    (source / file).write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        init(tmp_path / "search", source)
    assert not list((tmp_path / "search").iterdir())
