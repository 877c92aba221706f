"""Codecs of raw numbers and of words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

FACTOR = 4.0  # from the numbers that clients send to the inputs of the models
CLASSES = ("red", "green", "blue")
TAGS = ("NOUN", "VERB", "OTHER", "AFTER")
WORDS = tuple(f"w{index}" for index in range(40))
LONGEST = 12
Arrays = Mapping[str, np.ndarray[Any, Any]]


class Numbers:
    def decode(self, instances: Any) -> Arrays:
        return {"x": np.asarray(instances, np.float64).astype(np.float32) / np.float32(FACTOR)}


class ClassifyCodec(Numbers):
    def encode(self, outputs: Arrays) -> Sequence[Any]:
        return [{"label": CLASSES[int(row.argmax())]} for row in outputs["scores"]]


class RegressCodec(Numbers):
    def encode(self, outputs: Arrays) -> Sequence[Any]:
        return [{"value": float(value)} for value in outputs["y"]]


class RankCodec(Numbers):
    def encode(self, outputs: Arrays) -> Sequence[Any]:
        return [{"score": float(value)} for value in outputs["score"]]


class EmbedCodec(Numbers):
    def encode(self, outputs: Arrays) -> Sequence[Any]:
        return [row.tolist() for row in outputs["embedding"]]


class TagCodec:
    def decode(self, instances: Any) -> Arrays:
        rows = [[WORDS.index(word) for word in words] for words in instances]
        width = max(map(len, rows))
        ids, mask = (np.zeros((len(rows), width), np.int64) for _ in range(2))
        for index, row in enumerate(rows):
            ids[index, : len(row)], mask[index, : len(row)] = row, 1
        return {"input_ids": ids, "attention_mask": mask}

    def encode(self, outputs: Arrays, inputs: Arrays) -> Sequence[Any]:
        rows = zip(outputs["tags"].argmax(axis=2), inputs["attention_mask"], strict=True)
        return [[TAGS[tag] for tag in row[mask > 0]] for row, mask in rows]


class TalkCodec:
    files = ("tokenizer.json",)

    def __init__(self, folder: Any) -> None:
        pass

    def decode(self, instances: Any) -> Arrays:
        rows = [[WORDS.index(word) for word in text.split()] for text in instances]
        width = max(map(len, rows))
        ids, mask = (np.zeros((len(rows), width), np.int64) for _ in range(2))
        for index, row in enumerate(rows):
            ids[index, width - len(row) :], mask[index, width - len(row) :] = row, 1
        past = {f"past.0.{name}": np.zeros((len(rows), 2, 0, 4), np.float32) for name in ("key", "value")}
        return {"input_ids": ids, "attention_mask": mask, "position_ids": np.maximum(mask.cumsum(1) - 1, 0), **past}

    def encode(self, outputs: Arrays) -> Sequence[Any]:
        return [WORDS[int(row[-1].argmax())] for row in outputs["logits"]]
