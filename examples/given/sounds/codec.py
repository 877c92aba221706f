"""A recording → the model's samples → the text that is spoken, or the classes with the highest scores."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from sounds import Array, read_sound

MOST = 5  # classes of an answer


class Codec:
    """An instance is {"b64": a .wav file}, of 16 bits and at the model's rate; a prediction is a text or a list."""

    media_types = ("audio/wav",)
    files = ("model.json",)

    def __init__(self, folder: Path) -> None:
        self.facts: dict[str, Any] = json.loads((folder / "model.json").read_text())

    def decode(self, instances: Any) -> dict[str, Array]:
        sounds = [self._read(instance) for instance in instances]
        values = np.zeros((len(sounds), max(map(len, sounds))), np.float32)
        for row, sound in zip(values, sounds, strict=True):
            row[: len(sound)] = sound
        return {"input_values": values}

    def encode(self, outputs: dict[str, Array]) -> list[Any]:
        return [self._text(row) if "tokens" in self.facts else self._classes(row) for row in outputs["logits"]]

    def _text(self, logits: Array) -> dict[str, str]:
        tokens = [self.facts["tokens"][token] for token, _ in groupby(logits.argmax(axis=1).tolist())]
        text = "".join(
            " " if token == self.facts["space"] else token for token in tokens if token != self.facts["blank"]
        )
        return {"text": text.strip().lower() if self.facts["lowercase"] else text.strip()}

    def _classes(self, logits: Array) -> list[dict[str, Any]]:
        scores = logits
        if self.facts["function"] == "sigmoid":
            scores = 1 / (1 + np.exp(-logits))
        elif self.facts["function"] == "softmax":
            scores = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        order = np.argsort(-scores, kind="stable")[:MOST]
        return [{"label": self.facts["labels"][i], "score": float(scores[i])} for i in order]

    def _read(self, instance: Any) -> Array:
        samples = read_sound(instance, self.facts["rate"], self.facts["shortest"], self.facts["longest"])
        return (samples - samples.mean()) / np.sqrt(samples.var() + 1e-7) if self.facts["normalizes"] else samples
