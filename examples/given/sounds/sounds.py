"""Recordings: read from requests, and drawn as examples."""

from __future__ import annotations

import base64
import binascii
import io
import wave
from collections.abc import Iterable
from typing import Any

import numpy as np

from pipeline import InvalidPayload

Array = np.ndarray[Any, Any]


def read_sound(instance: Any, rate: int, shortest: int, longest: int) -> Array:
    """Return the samples of {"b64": a .wav file in base64}, from -1 to 1; of several channels the mean."""
    try:
        with wave.open(io.BytesIO(base64.b64decode(instance["b64"], validate=True))) as file:
            form, content = file.getparams()[1:3], file.readframes(file.getnframes())
            samples = np.frombuffer(content, "<i2" if form[0] == 2 else "u1").reshape(-1, file.getnchannels())
    except (KeyError, TypeError, ValueError, EOFError, binascii.Error, wave.Error) as error:
        raise InvalidPayload(f'instances: each must be {{"b64": a .wav file}}: {error}') from error
    if form != (2, rate) or not shortest <= len(samples) <= longest:
        size = f"at least {shortest} samples and at most {longest / rate:g} seconds"
        raise InvalidPayload(f"instances: each .wav must have 16 bits, {rate} Hz, {size}")
    return (samples.mean(axis=1) / 32768).astype(np.float32)


def write_sound(samples: Array, rate: int) -> dict[str, str]:
    file = io.BytesIO()
    with wave.open(file, "wb") as recording:
        recording.setnchannels(1)
        recording.setsampwidth(2)
        recording.setframerate(rate)
        recording.writeframes((samples * 32767).astype("<i2").tobytes())
    return {"b64": base64.b64encode(file.getvalue()).decode()}


def draw_sounds(lengths: Iterable[float], rate: int) -> list[dict[str, str]]:
    """Return recordings of tones and noise, of these lengths in samples."""
    rng, sounds = np.random.default_rng(0), []
    for length in lengths:
        time = np.arange(int(length)) / rate
        sound = np.sin(2 * np.pi * rng.uniform(100, 1000) * time) * np.sin(rng.uniform(1, 9) * time)
        sounds.append(write_sound(0.3 * sound + rng.normal(0, 0.02, len(time)), rate))
    return sounds
