"""What clients send → arrays for the model → what they get back. Only numpy; training uses it too."""

from __future__ import annotations

import base64
import binascii
import io
import wave
from typing import Any

import numpy as np

from pipeline import InvalidPayload

WORDS = ("one", "two", "three", "four", "five", "six")  # replace: your words, or the tokens of a tokenizer
END = len(WORDS)  # of a text
RATE, WINDOW, STEP, BANDS = 8000, 256, 128, 32  # samples each second, samples of a frame and between frames
LONGEST = 128  # frames of a recording: about two seconds


class Codec:
    """An instance is {"b64": a .wav file}, mono of 16 bits at 8 kHz; a prediction has the words and a score."""

    media_types = ("audio/wav",)

    def decode(self, instances: Any) -> dict[str, np.ndarray[Any, Any]]:
        pictures = [spectrogram(_read_wav(instance)) for instance in instances]
        longest = max(2, max(map(len, pictures)))
        sound = np.zeros((len(pictures), longest, BANDS), np.float32)
        mask = np.zeros((len(pictures), longest), np.int64)
        for row, picture in enumerate(pictures):
            sound[row, : len(picture)], mask[row, : len(picture)] = picture, 1
        return {"sound": sound, "mask": mask}

    def encode(self, outputs: dict[str, np.ndarray[Any, Any]]) -> list[Any]:
        rows = zip(outputs["tokens"].tolist(), outputs["score"].tolist(), strict=True)
        return [
            {"text": " ".join(WORDS[token] for token in row if token != END), "score": score} for row, score in rows
        ]


def _read_wav(instance: Any) -> np.ndarray[Any, Any]:
    try:
        with wave.open(io.BytesIO(base64.b64decode(instance["b64"], validate=True))) as file:
            form = (file.getnchannels(), file.getsampwidth(), file.getframerate())
            samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    except (KeyError, TypeError, ValueError, EOFError, binascii.Error, wave.Error) as error:
        raise InvalidPayload(f'instances: each must be {{"b64": a .wav file}}: {error}') from error
    if form != (1, 2, RATE) or not WINDOW <= len(samples) <= (LONGEST - 1) * STEP + WINDOW:
        raise InvalidPayload(f"instances: each .wav must have one channel of 16 bits, {RATE} Hz and at most 2 seconds")
    return samples / np.float32(32768)


def spectrogram(samples: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the logarithm of the power in each band of each frame, [frames, bands]."""
    frames = np.lib.stride_tricks.sliding_window_view(samples, WINDOW)[::STEP] * np.hanning(WINDOW)
    power = np.abs(np.fft.rfft(frames)[:, 1:]) ** 2
    bands = power.reshape(len(power), BANDS, -1).mean(axis=2)
    loudness: np.ndarray[Any, Any] = np.log10(bands + 1e-4) / 4
    return loudness.astype(np.float32)
