"""A recording → the model's samples → the text that is spoken, or the classes with the highest scores."""

from __future__ import annotations

import base64
import binascii
import io
import json
import wave
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from pipeline import InvalidPayload

MOST = 5  # classes of an answer


class Codec:
    """An instance is {"b64": a .wav file}, of 16 bits and at the model's rate; a prediction is a text or a list."""

    media_types = ("audio/wav",)
    files = ("model.json",)

    def __init__(self, folder: Path) -> None:
        self.facts: dict[str, Any] = json.loads((folder / "model.json").read_text())

    def decode(self, instances: Any) -> dict[str, np.ndarray[Any, Any]]:
        sounds = [self._read(instance) for instance in instances]
        values = np.zeros((len(sounds), max(map(len, sounds))), np.float32)
        for row, sound in zip(values, sounds, strict=True):
            row[: len(sound)] = sound
        return {"input_values": values}

    def encode(self, outputs: dict[str, np.ndarray[Any, Any]]) -> list[Any]:
        return [self._text(row) if "tokens" in self.facts else self._classes(row) for row in outputs["logits"]]

    def _text(self, logits: np.ndarray[Any, Any]) -> dict[str, str]:
        tokens = [self.facts["tokens"][token] for token, _ in groupby(logits.argmax(axis=1).tolist())]
        text = "".join(
            " " if token == self.facts["space"] else token for token in tokens if token != self.facts["blank"]
        )
        return {"text": text.strip().lower() if self.facts["lowercase"] else text.strip()}

    def _classes(self, logits: np.ndarray[Any, Any]) -> list[dict[str, Any]]:
        scores = logits
        if self.facts["function"] == "sigmoid":
            scores = 1 / (1 + np.exp(-logits))
        elif self.facts["function"] == "softmax":
            scores = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        order = np.argsort(-scores, kind="stable")[:MOST]
        return [{"label": self.facts["labels"][i], "score": float(scores[i])} for i in order]

    def _read(self, instance: Any) -> np.ndarray[Any, Any]:
        rate, shortest, longest = self.facts["rate"], self.facts["shortest"], self.facts["longest"]
        try:
            with wave.open(io.BytesIO(base64.b64decode(instance["b64"], validate=True))) as file:
                form = (file.getnchannels(), file.getsampwidth(), file.getframerate())
                content = file.readframes(file.getnframes())
        except (KeyError, TypeError, ValueError, EOFError, binascii.Error, wave.Error) as error:
            raise InvalidPayload(f'instances: each must be {{"b64": a .wav file}}: {error}') from error
        if form != (1, 2, rate) or not 2 * shortest <= len(content) <= 2 * longest:
            seconds = f"{shortest / rate:g} to {longest / rate:g} seconds"
            raise InvalidPayload(f"instances: each .wav must have one channel of 16 bits, {rate} Hz and {seconds}")
        samples = np.frombuffer(content, "<i2") / np.float32(32768)
        return (samples - samples.mean()) / np.sqrt(samples.var() + 1e-7) if self.facts["normalizes"] else samples
