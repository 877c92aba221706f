"""What clients send → arrays for the model → what they get back. No torch; training uses it too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from pipeline import InvalidPayload


class Codec:
    """An instance is a text or its token ids; a prediction is its vector. Long texts are cut, as is usual for them."""

    embeddings = True  # the service has OpenAI's endpoint for them
    files = ("tokenizer.json", "config.json", "sentence_bert_config.json")  # they travel in the bundle
    requires = ("tokenizers",)

    def __init__(self, folder: Path) -> None:
        settings = json.loads((folder / "sentence_bert_config.json").read_text())
        self.lowercase = settings.get("do_lower_case", False)
        config = json.loads((folder / "config.json").read_text())
        self.padding = config.get("pad_token_id") or 0
        self.dimensions = tuple(config.get("matryoshka_dimensions") or ())  # to which vectors may be cut
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.longest: int = settings["max_seq_length"]
        self.tokenizer.enable_truncation(self.longest)

    def decode(self, instances: Any) -> dict[str, np.ndarray[Any, Any]]:
        return self.rows([[text] for text in instances])

    def rows(self, texts: list[list[Any]]) -> dict[str, np.ndarray[Any, Any]]:
        """Return token ids by sample, text and token: a request has one text for each sample, training several."""
        tokens = [[self.tokenize(text) for text in row] for row in texts]
        longest = max(2, max(len(text) for row in tokens for text in row))
        ids = np.full((len(tokens), len(tokens[0]), longest), self.padding, np.int64)
        mask = np.zeros_like(ids)
        for i, row in enumerate(tokens):
            for j, text in enumerate(row):
                ids[i, j, : len(text)], mask[i, j, : len(text)] = text, 1
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
        return [vectors[0].tolist() for vectors in outputs["vectors"]]
