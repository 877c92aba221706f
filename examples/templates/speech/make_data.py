"""Make up spoken digits: data/train.jsonl, validation.jsonl and test.jsonl with the .wav files they name.

Each word is a sound of two tones of its own, of any length, pitch and volume. Replace these by your own recordings.
"""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np

RATE = 8000
WORDS = ("one", "two", "three", "four", "five", "six")


def speak(words: list[int], random: np.random.Generator) -> np.ndarray[Any, Any]:
    parts = [_silence(random)]
    for word in words:
        time = np.arange(int(random.uniform(0.08, 0.16) * RATE)) / RATE
        tones = np.array([300 + 130 * word, 1200 + 350 * word]) * random.uniform(0.95, 1.05)
        sound = np.sin(2 * np.pi * tones[:, None] * time + random.uniform(0, 6, (2, 1))).sum(axis=0)
        parts += [sound * np.hanning(len(time)) * random.uniform(0.15, 0.45), _silence(random)]
    sound = np.concatenate(parts)
    return sound + random.normal(0, 0.01, len(sound))


def _silence(random: np.random.Generator) -> np.ndarray[Any, Any]:
    return np.zeros(int(random.uniform(0.02, 0.06) * RATE))


generator = np.random.default_rng(1)
for split, count in {"train": 1500, "validation": 150, "test": 300}.items():
    folder, rows = Path("data") / split, []
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        words = generator.integers(0, len(WORDS), int(generator.integers(1, 6))).tolist()
        samples = (speak(words, generator).clip(-1, 1) * 32767).astype("<i2")
        with wave.open(str(folder / f"{number:04}.wav"), "wb") as file:
            file.setparams((1, 2, RATE, 0, "NONE", ""))
            file.writeframes(samples.tobytes())
        rows.append({"audio": f"{split}/{number:04}.wav", "words": [WORDS[word] for word in words]})
    Path(f"data/{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
