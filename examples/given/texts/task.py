"""A classifier of texts or of their tokens with its weights as they are. To finetune it, add labelled data, loss()."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from codec import Codec
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    pipeline,
)

from pipeline import ConfigError

LONGEST = 512  # tokens of a text, if the model takes as many
SAMPLES = 32  # texts on which the ONNX file is compared with torch; replace: your own in data()
EXAMPLES = ["I have never seen a better film.", "Ada Lovelace wrote to Charles Babbage in London.", "Perhaps."]


class Net(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        # "eager": a token whose window has only padding gets the same numbers from torch and the ONNX file.
        options = {"dtype": torch.float32, "attn_implementation": "eager"}
        kind = AutoModelForTokenClassification if tags_tokens(config) else AutoModelForSequenceClassification
        self.model = kind.from_config(config, **options)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids, attention_mask=attention_mask).logits
        return logits


def tags_tokens(config: Any) -> bool:
    return bool(config.architectures[0].endswith("ForTokenClassification"))


class Task:
    inputs = ("input_ids", "attention_mask")
    outputs = ("logits",)
    axes = {"input_ids": ("batch", "tokens"), "attention_mask": ("batch", "tokens")}
    longest = {"tokens": LONGEST}

    def make_files(self, folder: Path) -> None:
        """Write model.json for the codec."""
        config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        if config.model_type == "xlnet":
            raise ConfigError(
                "XLNet takes texts that are padded on the left, with a type for each token; to fix it: write both in "
                "decode() of codec.py, with the input token_type_ids, and remove this check from task.py"
            )
        is_multiple = config.problem_type == "multi_label_classification" or config.num_labels == 1
        function = "none" if config.problem_type == "regression" else "sigmoid" if is_multiple else "softmax"
        facts = {
            "tags": tags_tokens(config),
            "labels": [config.id2label[i] for i in range(config.num_labels)],
            "function": "softmax" if tags_tokens(config) else function,
            "longest": longest_text(config, tokenizer),
            "padding": tokenizer.pad_token_id or 0,
        }
        (folder / "model.json").write_text(json.dumps(facts, indent=1))

    def use_files(self, folder: Path) -> None:
        self.folder, self.codec = folder, Codec(folder)
        self.longest = {"tokens": self.codec.longest}

    def adapt(self, folder: Path) -> nn.Module:
        return Net(AutoConfig.from_pretrained(folder))

    def model(self) -> nn.Module:
        return self.adapt(self.folder)

    def data(self, split: str) -> Any:
        decoded = self.codec.decode(random_texts(self.folder, self.codec.longest))
        return {name: decoded[name] for name in self.inputs}

    def example(self) -> list[Any]:
        return EXAMPLES

    def reference(self, instances: list[Any], model: Any) -> list[Any]:
        """Return the answers of transformers' own pipeline."""
        library = {"model": model.model, "tokenizer": AutoTokenizer.from_pretrained(self.folder)}
        if not self.codec.tags:
            return list(pipeline("text-classification", **library)(instances))
        names, answers = ("entity", "score", "index", "start", "end"), pipeline("token-classification", **library)
        return [[{name: plain(token[name]) for name in names} for token in tokens] for tokens in answers(instances)]


def plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def longest_text(config: Any, tokenizer: Any) -> int:
    """Return how many tokens the model takes; RoBERTa and its kind begin to count positions after the padding."""
    positions = max(0, getattr(config, "max_position_embeddings", None) or 0) or LONGEST
    is_offset = positions % 2 == 0 and getattr(config, "pad_token_id", None) == 1 and positions % 8 == 2
    return min(LONGEST, int(min(tokenizer.model_max_length, 10**6)), positions - 2 * is_offset)


def random_texts(folder: Path, longest: int) -> list[str]:
    """Return texts of random tokens, from short ones to the longest."""
    tokenizer, rng = AutoTokenizer.from_pretrained(folder), np.random.default_rng(0)
    special, texts = set(tokenizer.all_special_ids), []
    for length in np.linspace(longest // 4, longest - 8, SAMPLES).astype(int).tolist():
        ids = [token for token in rng.integers(0, len(tokenizer), max(2, length)).tolist() if token not in special]
        while len(tokenizer(text := tokenizer.decode(ids))["input_ids"]) >= longest:
            ids = ids[: len(ids) * 3 // 4]  # a decoded text may have more tokens; the longest would fix the axis
        texts.append(text or EXAMPLES[0])
    return texts
