"""A text → the model's tokens → its vector. Long texts are cut, as is usual for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from pipeline import InvalidPayload


class Codec:
    """An instance is a text or its token ids; a prediction is its vector."""

    embeddings = True  # the service has OpenAI's endpoint for them
    files = ("tokenizer.json", "model.json")
    requires = ("tokenizers",)

    def __init__(self, folder: Path) -> None:
        facts = json.loads((folder / "model.json").read_text())
        self.dimensions = tuple(facts["dimensions"])  # to which vectors may be cut
        self.longest, self.lowercase, self.padding = facts["longest"], facts["lowercase"], facts["padding"]
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(self.longest)

    def decode(self, instances: Any) -> dict[str, np.ndarray[Any, Any]]:
        tokens = [self.tokenize(text) for text in instances]
        ids = np.full((len(tokens), max(2, *map(len, tokens))), self.padding, np.int64)
        mask = np.zeros_like(ids)
        for row, text in enumerate(tokens):
            ids[row, : len(text)], mask[row, : len(text)] = text, 1
        return {"input_ids": ids, "attention_mask": mask}

    def tokenize(self, text: Any) -> list[int]:
        if isinstance(text, list):
            return self.check_ids(text)
        if not isinstance(text, str) or not text.strip():
            raise InvalidPayload("instances: each must be a text")
        text = text.strip()
        return list(self.tokenizer.encode(text.lower() if self.lowercase else text).ids)

    def check_ids(self, ids: list[Any]) -> list[int]:
        size = self.tokenizer.get_vocab_size()
        if not ids or not all(type(token) is int and 0 <= token < size for token in ids):
            raise InvalidPayload(f"instances: token ids must be whole numbers from 0 to {size - 1}")
        return ids[: self.longest]

    def encode(self, outputs: dict[str, np.ndarray[Any, Any]]) -> list[Any]:
        return list(outputs["vectors"].tolist())
