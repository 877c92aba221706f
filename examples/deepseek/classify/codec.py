"""A Python snippet in, the package of the standard library that it resembles out, with probabilities."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from pipeline import InvalidPayload

Arrays = dict[str, np.ndarray[Any, Any]]
# Packages that every distribution of Python has.
PACKAGES = (
    "asyncio", "ctypes", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "urllib", "xml",
)  # fmt: skip
LONGEST = 192  # tokens of a snippet, and so the width of every row


class SnippetCodec:
    """An instance is a text; a prediction is the package and the probabilities of all packages."""

    files = ("tokenizer.json", "config.json")
    requires = ("tokenizers",)

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._pad = json.loads((folder / "config.json").read_text()).get("pad_token_id") or 0

    def decode(self, instances: Any) -> Arrays:
        return self.rows([self._read(text, index) for index, text in enumerate(instances)])

    def rows(self, tokens: list[list[int]]) -> Arrays:
        """Return rows that are padded on the left; training uses this method too."""
        ids = np.full((len(tokens), LONGEST), self._pad, np.int64)
        mask, positions = np.zeros_like(ids), np.zeros_like(ids)
        for index, row in enumerate(tokens):
            columns = slice(LONGEST - len(row), LONGEST)
            ids[index, columns], mask[index, columns], positions[index, columns] = row, 1, np.arange(len(row))
        return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}

    def tokens(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def encode(self, outputs: Arrays) -> list[Any]:
        scores = outputs["logits"].astype(np.float64)
        probabilities = np.exp(scores - scores.max(axis=1, keepdims=True))
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        return [
            {"package": PACKAGES[int(row.argmax())], "probabilities": dict(zip(PACKAGES, row.tolist(), strict=True))}
            for row in probabilities
        ]

    def _read(self, text: Any, index: int) -> list[int]:
        location = f"instances[{index}]"
        if not isinstance(text, str):
            raise InvalidPayload(f"{location}: must be a text, found {type(text).__name__}")
        if not text.strip():
            raise InvalidPayload(f"{location}: the text is empty")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidPayload(f"{location}: no valid UTF-8: half a character at position {error.start}") from error
        tokens = self.tokens(text)
        if len(tokens) > LONGEST:
            raise InvalidPayload(f"{location}: {len(tokens)} tokens, but the model takes at most {LONGEST}")
        return tokens
