"""A text → the model's tokens → its class, as transformers' own pipeline gives them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from pipeline import InvalidPayload


class Codec:
    """An instance is a text; a prediction is a class with its score."""

    files = ("tokenizer.json", "model.json")
    requires = ("tokenizers",)

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        facts = json.loads((folder / "model.json").read_text())
        self.labels, self.function, self.longest = facts["labels"], facts["function"], facts["longest"]
        self.padding: int = facts["padding"]

    def decode(self, instances: Any) -> dict[str, np.ndarray[Any, Any]]:
        if not all(isinstance(text, str) and text.strip() for text in instances):
            raise InvalidPayload("instances: each must be a text")
        tokens = [encoding.ids for encoding in self._tokenizer.encode_batch(list(instances))]
        longest = max(map(len, tokens))
        if longest > self.longest:
            raise InvalidPayload(f"instances: a text has {longest} tokens, but the model takes at most {self.longest}")
        ids = np.full((len(tokens), longest), self.padding, np.int64)
        mask = np.zeros_like(ids)
        for row, text in enumerate(tokens):
            ids[row, : len(text)], mask[row, : len(text)] = text, 1
        return {"input_ids": ids, "attention_mask": mask}

    def encode(self, outputs: dict[str, np.ndarray[Any, Any]]) -> list[Any]:
        scores = _apply(self.function, outputs["logits"])
        return [{"label": self.labels[row.argmax()], "score": float(row.max())} for row in scores]


def _apply(function: str, logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if function == "none":
        return logits
    if function == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    scores = np.exp(logits - logits.max(axis=1, keepdims=True))
    return scores / scores.sum(axis=1, keepdims=True)
