"""Text in, the likeliest next token out; prompts and chats go to the service's /openai/v1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from pipeline import InvalidPayload


class Codec:
    """An instance is a text that the model continues; a prediction is the next token with its probability."""

    files = ("tokenizer.json", "model.json")
    requires = ("tokenizers",)

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.facts: dict[str, Any] = json.loads((folder / "model.json").read_text())

    def decode(self, instances: Any) -> dict[str, np.ndarray[Any, Any]]:
        rows = [self._read(text) for text in instances]
        width = max(map(len, rows))
        ids, mask, positions = np.zeros((3, len(rows), width), np.int64)
        for index, row in enumerate(rows):  # padding is on the left, so the last column is the end of each text
            columns = slice(width - len(row), width)
            ids[index, columns], mask[index, columns], positions[index, columns] = row, 1, np.arange(len(row))
        past = {
            f"past.{layer}.{kind}": np.zeros((len(rows), heads, 0, width), np.float32)
            for layer, (heads, *widths) in enumerate(self.facts["past"])
            for kind, width in zip(self.facts["names"], widths, strict=True)
        }
        return {"input_ids": ids, "attention_mask": mask, "position_ids": positions, **past}

    def encode(self, outputs: dict[str, np.ndarray[Any, Any]]) -> list[Any]:
        scores = outputs["logits"][:, -1].astype(np.float64)
        probabilities = np.exp(scores - scores.max(axis=1, keepdims=True))
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        return [
            {"next": self._text(row.argmax()), "token": int(row.argmax()), "probability": float(row.max())}
            for row in probabilities
        ]

    def _read(self, text: Any) -> list[int]:
        ids = self._tokenizer.encode(text).ids if isinstance(text, str) else []
        if not 0 < len(ids) <= self.facts["longest"]:
            raise InvalidPayload(f"instances: each must be a text of 1 to {self.facts['longest']} tokens")
        return list(ids)

    def _text(self, token: Any) -> str:
        return str(self._tokenizer.decode([int(token)], skip_special_tokens=False))
