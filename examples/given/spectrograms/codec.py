"""A recording → the spectrogram that an Audio Spectrogram Transformer takes → the classes with the highest scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from sounds import Array, read_sound

MOST = 5  # classes of an answer
WINDOW, STEP = 400, 160  # samples


class Codec:
    """An instance is {"b64": a .wav file}, of 16 bits and at the model's rate; a prediction is a list of classes."""

    media_types = ("audio/wav",)
    files = ("model.json", "bands.npy")

    def __init__(self, folder: Path) -> None:
        self.facts: dict[str, Any] = json.loads((folder / "model.json").read_text())
        self._bands = np.load(folder / "bands.npy")

    def decode(self, instances: Any) -> dict[str, Array]:
        sounds = [read_sound(instance, self.facts["rate"], WINDOW, self.facts["longest"]) for instance in instances]
        return {"input_values": np.stack([self.spectrogram(sound) for sound in sounds])}

    def spectrogram(self, samples: Array) -> Array:
        """Return the logarithm of the power in each band, [frames, bands], cut or padded, as ASTFeatureExtractor."""
        frames = np.lib.stride_tricks.sliding_window_view(samples.astype(np.float64), WINDOW)[::STEP]
        frames = frames - frames.mean(axis=1, keepdims=True)
        frames[:, 1:], frames[:, 0] = frames[:, 1:] - 0.97 * frames[:, :-1], 0.03 * frames[:, 0]
        power = np.abs(np.fft.rfft(frames * np.hanning(WINDOW), 512)) ** 2
        loudness = np.log(np.maximum(power @ self._bands, 1.192092955078125e-07)).astype(np.float32)
        values = np.zeros((self.facts["frames"], loudness.shape[1]), np.float32)
        values[: len(loudness)] = loudness[: len(values)]
        return (values - np.float32(self.facts["mean"])) / np.float32(self.facts["std"])

    def encode(self, outputs: dict[str, Array]) -> list[Any]:
        return [self._classes(row) for row in outputs["logits"]]

    def _classes(self, logits: Array) -> list[dict[str, Any]]:
        scores = logits
        if self.facts["function"] == "sigmoid":
            scores = 1 / (1 + np.exp(-logits))
        elif self.facts["function"] == "softmax":
            scores = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        order = np.argsort(-scores, kind="stable")[:MOST]
        return [{"label": self.facts["labels"][i], "score": float(scores[i])} for i in order]
