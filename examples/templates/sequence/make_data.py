"""Make up messages with tags: data/train.jsonl, validation.jsonl and test.jsonl. Replace these by your own texts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np


def made_up_message(random: np.random.Generator) -> tuple[tuple[str, str], ...]:
    """Fill in a pattern. Some names are those of persons and cities or months: only their neighbors decide."""
    day = str(random.integers(1, 31))
    words: list[tuple[str, str]] = []
    for word in str(random.choice(_PATTERNS)).split():
        if word == "DATE":
            words += [(day, "DATE"), (str(random.choice(_NAMES["MONTH"])), "DATE")]
        elif word in _NAMES:
            words.append((str(random.choice(_NAMES[word])), "DATE" if word == "MONTH" else word))
        else:
            words.append((word, "O"))
    return tuple(words)


_NAMES = {
    "PERSON": ("April", "June", "May", "Paris", "Florence", "Sydney", "Anna", "Tom", "Ravi", "Mei", "Olga", "Luis"),
    "CITY": ("Paris", "Florence", "Sydney", "Rome", "Lagos", "Lima", "Oslo", "Kyoto", "Boston", "Cairo"),
    "MONTH": ("April", "June", "May", "July", "March", "August"),
}
_PATTERNS = (
    "PERSON meets PERSON in CITY on DATE .",
    "PERSON will be in CITY in MONTH .",
    "In MONTH PERSON flies from CITY to CITY .",
    "The train to CITY leaves on DATE with PERSON and PERSON .",
    "Call PERSON before MONTH , then write to PERSON .",
)


generator = np.random.default_rng(0)
messages = list(dict.fromkeys(made_up_message(generator) for _ in range(2000)))
Path("data").mkdir(exist_ok=True)
for name, part in {"train": slice(1000), "validation": slice(1000, 1300), "test": slice(1300, 1900)}.items():
    rows = [{"words": [word for word, _ in message], "tags": [tag for _, tag in message]} for message in messages[part]]
    Path(f"data/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
