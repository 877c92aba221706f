"""What clients send → arrays for the model → what they get back. No torch; training uses it too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from pipeline import InvalidPayload

CLASSES = ("bad", "good")  # replace: your classes
LONGEST = 64  # tokens of a text


class Codec:
    """An instance is a text; a prediction is a class with its probability."""

    files = ("tokenizer.json",)  # of the task's make_files(); they travel in the bundle
    requires = ("tokenizers",)  # packages besides numpy that the service needs

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def decode(self, instances: Any) -> dict[str, np.ndarray[Any, Any]]:
        if not all(isinstance(text, str) and text.strip() for text in instances):
            raise InvalidPayload("instances: each must be a text")
        tokens = [encoding.ids for encoding in self._tokenizer.encode_batch(list(instances))]
        longest = max(2, max(map(len, tokens)))
        if longest > LONGEST:
            raise InvalidPayload(f"instances: a text has {longest} tokens, but the model takes at most {LONGEST}")
        ids, mask = np.zeros((2, len(tokens), longest), np.int64)
        for row, text in enumerate(tokens):
            ids[row, : len(text)], mask[row, : len(text)] = text, 1
        return {"input_ids": ids, "attention_mask": mask}

    def encode(self, outputs: dict[str, np.ndarray[Any, Any]]) -> list[Any]:
        scores = np.exp(outputs["logits"] - outputs["logits"].max(axis=1, keepdims=True))
        probabilities = scores / scores.sum(axis=1, keepdims=True)
        return [{"class": CLASSES[row.argmax()], "probability": float(row.max())} for row in probabilities]
