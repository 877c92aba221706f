"""A recording → the spectrogram that Whisper takes → the text that is spoken."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from sounds import Array, read_sound
from tokenizers import Tokenizer


class Codec:
    """An instance is {"b64": a .wav file}, of 16 bits and at the model's rate; a prediction has the text."""

    media_types = ("audio/wav",)
    files = ("tokenizer.json", "model.json", "bands.npy")
    requires = ("tokenizers",)

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._bands = np.load(folder / "bands.npy")
        facts = json.loads((folder / "model.json").read_text())
        self.rate, self.longest, self.window, self.step = (
            facts[name] for name in ("rate", "longest", "window", "step")
        )

    def decode(self, instances: Any) -> dict[str, Array]:
        sounds = [read_sound(instance, self.rate, 1, self.longest) for instance in instances]
        return {"input_features": np.stack([self.spectrogram(sound) for sound in sounds])}

    def spectrogram(self, samples: Array) -> Array:
        """Return the logarithm of the power in each band of each frame, [bands, frames], as WhisperFeatureExtractor."""
        padded = np.pad(np.pad(samples, (0, self.longest - len(samples))), self.window // 2, mode="reflect")
        frames = np.lib.stride_tricks.sliding_window_view(padded, self.window)[:: self.step][:-1]
        hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(self.window) / self.window)
        power = np.abs(np.fft.rfft(frames * hann)) ** 2
        loudness = np.log10(np.maximum(power @ self._bands, 1e-10)).T
        return ((np.maximum(loudness, loudness.max() - 8) + 4) / 4).astype(np.float32)

    def encode(self, outputs: dict[str, Array]) -> list[Any]:
        texts = self._tokenizer.decode_batch(outputs["tokens"].tolist(), skip_special_tokens=True)
        return [{"text": re.sub(r"<\|[\d.]+\|>", "", text)} for text in texts]  # times are no special tokens
