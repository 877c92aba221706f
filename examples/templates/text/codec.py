"""What clients send → arrays for the model → what they get back. Only numpy; training uses it too."""

from __future__ import annotations

import re
import zlib
from typing import Any

import numpy as np

from pipeline import InvalidPayload

CLASSES = ("bad", "good")  # replace: your classes
LONGEST = 64  # words of a text
VOCABULARY = 4096  # rows of the embedding; 0 is padding


class Codec:
    """An instance is a text; a prediction is a class with its probability."""

    def decode(self, instances: Any) -> dict[str, np.ndarray[Any, Any]]:
        tokens = [tokenize(text) for text in instances]
        longest = max(2, max(map(len, tokens)))
        ids, mask = np.zeros((2, len(tokens), longest), np.int64)
        for row, text in enumerate(tokens):
            ids[row, : len(text)], mask[row, : len(text)] = text, 1
        return {"input_ids": ids, "attention_mask": mask}

    def encode(self, outputs: dict[str, np.ndarray[Any, Any]]) -> list[Any]:
        scores = np.exp(outputs["logits"] - outputs["logits"].max(axis=1, keepdims=True))
        probabilities = scores / scores.sum(axis=1, keepdims=True)
        return [{"class": CLASSES[row.argmax()], "probability": float(row.max())} for row in probabilities]


def tokenize(text: Any) -> list[int]:
    """Number words by a hash, which needs no vocabulary. For a tokenizer.json, see docs/your-own-model.md."""
    words = re.findall(r"\w+|[^\w\s]", text.lower()) if isinstance(text, str) else []
    if not 0 < len(words) <= LONGEST:
        raise InvalidPayload(f"instances: each must be a text of 1 to {LONGEST} words")
    return [1 + zlib.crc32(word.encode()) % (VOCABULARY - 1) for word in words]
