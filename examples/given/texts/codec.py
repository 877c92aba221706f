"""A text → the model's tokens → its class, or a class for each token, as transformers' own pipelines give them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from pipeline import InvalidPayload

Array = np.ndarray[Any, Any]


class Codec:
    """An instance is a text; a prediction is a class with its score, or tokens with their classes and places."""

    files = ("tokenizer.json", "model.json")
    requires = ("tokenizers",)

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        facts = json.loads((folder / "model.json").read_text())
        self.labels, self.function, self.longest = facts["labels"], facts["function"], facts["longest"]
        self.padding: int = facts["padding"]
        self.tags: bool = facts["tags"]  # whether each token has a class

    def decode(self, instances: Any) -> dict[str, Array]:
        if not all(isinstance(text, str) and text.strip() for text in instances):
            raise InvalidPayload("instances: each must be a text")
        encodings = self.tokenizer.encode_batch(list(instances))
        longest = max(len(encoding.ids) for encoding in encodings)
        if longest > self.longest:
            raise InvalidPayload(f"instances: a text has {longest} tokens, but the model takes at most {self.longest}")
        ids = np.full((len(encodings), longest), self.padding, np.int64)
        mask, places = np.zeros_like(ids), np.zeros((*ids.shape, 2), np.int64)
        for row, encoding in enumerate(encodings):
            length = len(encoding.ids)
            ids[row, :length], mask[row, :length], places[row, :length] = encoding.ids, 1, encoding.offsets
        return {"input_ids": ids, "attention_mask": mask, "places": places}

    def encode(self, outputs: dict[str, Array], inputs: dict[str, Array]) -> list[Any]:
        scores = _apply(self.function, outputs["logits"])
        if not self.tags:
            return [{"label": self.labels[row.argmax()], "score": float(row.max())} for row in scores]
        rows = zip(inputs["places"].tolist(), inputs["attention_mask"].sum(axis=1).tolist(), scores, strict=True)
        return [self._tag(*row) for row in rows]

    def _tag(self, places: list[Any], length: int, scores: Array) -> list[dict[str, Any]]:
        """Return the tokens that have a class, which "O" is not."""
        mask = self.tokenizer.encode("a").special_tokens_mask
        first, after = mask.index(0), mask[::-1].index(0)  # special tokens before a text, and after it
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


def _apply(function: str, logits: Array) -> Array:
    if function == "none":
        return logits
    if function == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    scores = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return scores / scores.sum(axis=-1, keepdims=True)
