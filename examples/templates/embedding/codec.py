"""What clients send → arrays for the model → what they get back. Only numpy; training uses it too."""

from __future__ import annotations

import re
import zlib
from typing import Any

import numpy as np

from pipeline import InvalidPayload

LONGEST = 64  # words of a text
VOCABULARY = 4096  # rows of the embedding; 0 is padding


class Codec:
    """An instance is a text, such as a query or a document; a prediction is its vector of length 1."""

    embeddings = True  # the service has OpenAI's endpoint for them

    def decode(self, instances: Any) -> dict[str, np.ndarray[Any, Any]]:
        return self.rows([[text] for text in instances])

    def rows(self, texts: list[list[Any]]) -> dict[str, np.ndarray[Any, Any]]:
        """Return word ids by sample, text and word: a request has one text for each sample, training several."""
        tokens = [[tokenize(text) for text in row] for row in texts]
        longest = max(2, max(len(text) for row in tokens for text in row))
        ids, mask = np.zeros((2, len(tokens), len(tokens[0]), longest), np.int64)
        for i, row in enumerate(tokens):
            for j, text in enumerate(row):
                ids[i, j, : len(text)], mask[i, j, : len(text)] = text, 1
        return {"input_ids": ids, "attention_mask": mask}

    def encode(self, outputs: dict[str, np.ndarray[Any, Any]]) -> list[Any]:
        return [vectors[0].tolist() for vectors in outputs["vectors"]]


def tokenize(text: Any) -> list[int]:
    """Number words by a hash, which needs no vocabulary. For a tokenizer.json, see docs/your-own-model.md."""
    words = re.findall(r"\w+", text.lower()) if isinstance(text, str) else []
    if not 0 < len(words) <= LONGEST:
        raise InvalidPayload(f"instances: each must be a text of 1 to {LONGEST} words")
    return [1 + zlib.crc32(word.encode()) % (VOCABULARY - 1) for word in words]
