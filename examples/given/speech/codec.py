"""A recording → the spectrogram that Whisper takes → the text that is spoken."""

from __future__ import annotations

import base64
import binascii
import io
import json
import re
import wave
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from pipeline import InvalidPayload


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

    def decode(self, instances: Any) -> dict[str, np.ndarray[Any, Any]]:
        return {"input_features": np.stack([self.spectrogram(self._read(instance)) for instance in instances])}

    def spectrogram(self, samples: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the logarithm of the power in each band of each frame, [bands, frames], as WhisperFeatureExtractor."""
        padded = np.pad(np.pad(samples, (0, self.longest - len(samples))), self.window // 2, mode="reflect")
        frames = np.lib.stride_tricks.sliding_window_view(padded, self.window)[:: self.step][:-1]
        hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(self.window) / self.window)
        power = np.abs(np.fft.rfft(frames * hann)) ** 2
        loudness = np.log10(np.maximum(power @ self._bands, 1e-10)).T
        return ((np.maximum(loudness, loudness.max() - 8) + 4) / 4).astype(np.float32)

    def encode(self, outputs: dict[str, np.ndarray[Any, Any]]) -> list[Any]:
        texts = self._tokenizer.decode_batch(outputs["tokens"].tolist(), skip_special_tokens=True)
        return [{"text": re.sub(r"<\|[\d.]+\|>", "", text)} for text in texts]  # times are no special tokens

    def _read(self, instance: Any) -> np.ndarray[Any, Any]:
        try:
            with wave.open(io.BytesIO(base64.b64decode(instance["b64"], validate=True))) as file:
                channels, width, rate = file.getnchannels(), file.getsampwidth(), file.getframerate()
                samples = np.frombuffer(file.readframes(file.getnframes()), "<i2" if width == 2 else "u1")
        except (KeyError, TypeError, ValueError, EOFError, binascii.Error, wave.Error) as error:
            raise InvalidPayload(f'instances: each must be {{"b64": a .wav file}}: {error}') from error
        if (width, rate) != (2, self.rate) or not 0 < len(samples) // channels <= self.longest:
            seconds = self.longest / self.rate
            raise InvalidPayload(
                f"instances: each .wav must have 16 bits, {self.rate} Hz and at most {seconds:g} seconds"
            )
        return samples.reshape(-1, channels).mean(axis=1) / 32768
