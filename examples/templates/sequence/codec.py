"""What clients send → arrays for the model → what they get back. Only numpy; training uses it too."""

from __future__ import annotations

import re
import zlib
from typing import Any

import numpy as np

from pipeline import InvalidPayload

TAGS = ("O", "PERSON", "CITY", "DATE")  # replace: your tags
LONGEST = 64  # words of a text
VOCABULARY = 4096  # rows of the embedding; 0 is padding


class Codec:
    """An instance is a text; a prediction is a tag for each of its words."""

    def decode(self, instances: Any) -> dict[str, np.ndarray[Any, Any]]:
        tokens = [
            [1 + zlib.crc32(word.encode()) % (VOCABULARY - 1) for word in split_words(text)] for text in instances
        ]
        longest = max(2, max(map(len, tokens)))
        ids, mask = np.zeros((2, len(tokens), longest), np.int64)
        for row, text in enumerate(tokens):
            ids[row, : len(text)], mask[row, : len(text)] = text, 1
        return {"input_ids": ids, "attention_mask": mask}

    def encode(self, outputs: dict[str, np.ndarray[Any, Any]], inputs: dict[str, np.ndarray[Any, Any]]) -> list[Any]:
        """`inputs` is what decode returned: its mask marks the words, the rest is padding."""
        rows = zip(outputs["scores"].argmax(axis=2), inputs["attention_mask"], strict=True)
        return [{"tags": [TAGS[tag] for tag in tags[mask > 0]]} for tags, mask in rows]


def split_words(text: Any) -> list[str]:
    words = re.findall(r"\w+|[^\w\s]", text) if isinstance(text, str) else []
    if not 0 < len(words) <= LONGEST:
        raise InvalidPayload(f"instances: each must be a text of 1 to {LONGEST} words")
    return words
