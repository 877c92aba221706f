"""A text → the model's tokens → a class for each, as transformers' own pipeline gives them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from pipeline import InvalidPayload


class Codec:
    """An instance is a text; a prediction has each token with a class, and its place in the text."""

    files = ("tokenizer.json", "model.json")
    requires = ("tokenizers",)

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        mask = self._tokenizer.encode("a").special_tokens_mask
        self._special = mask.index(0), mask[::-1].index(0)  # special tokens before a text, and after it
        facts = json.loads((folder / "model.json").read_text())
        self.labels, self.longest = facts["labels"], facts["longest"]
        self.padding: int = facts["padding"]

    def decode(self, instances: Any) -> dict[str, np.ndarray[Any, Any]]:
        if not all(isinstance(text, str) and text.strip() for text in instances):
            raise InvalidPayload("instances: each must be a text")
        encodings = self._tokenizer.encode_batch(list(instances))
        longest = max(len(encoding.ids) for encoding in encodings)
        if longest > self.longest:
            raise InvalidPayload(f"instances: a text has {longest} tokens, but the model takes at most {self.longest}")
        ids = np.full((len(encodings), longest), self.padding, np.int64)
        mask, places = np.zeros_like(ids), np.zeros((*ids.shape, 2), np.int64)
        for row, encoding in enumerate(encodings):
            length = len(encoding.ids)
            ids[row, :length], mask[row, :length], places[row, :length] = encoding.ids, 1, encoding.offsets
        return {"input_ids": ids, "attention_mask": mask, "places": places}

    def encode(self, outputs: dict[str, np.ndarray[Any, Any]], inputs: dict[str, np.ndarray[Any, Any]]) -> list[Any]:
        """Return the tokens of each text that have a class, which "O" is not."""
        scores = np.exp(outputs["logits"] - outputs["logits"].max(axis=2, keepdims=True))
        scores /= scores.sum(axis=2, keepdims=True)
        rows = zip(inputs["places"].tolist(), inputs["attention_mask"].sum(axis=1).tolist(), scores, strict=True)
        return [self._tags(*row) for row in rows]

    def _tags(self, places: list[Any], length: int, scores: np.ndarray[Any, Any]) -> list[dict[str, Any]]:
        first, after = self._special
        tags = [
            {
                "entity": self.labels[scores[index].argmax()],
                "score": float(scores[index].max()),
                "index": index,
                "start": places[index][0],
                "end": places[index][1],
            }
            for index in range(first, length - after)
        ]
        return [tag for tag in tags if tag["entity"] != "O"]
