"""Make up hotels: data/train.jsonl, validation.jsonl and test.jsonl. Replace these by your own queries and answers.

Query and answer mean the same by other words; a wrong text differs from the answer in one meaning.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

WRONG = 7  # texts that do not answer the query


def made_up_row(random: np.random.Generator) -> dict[str, Any]:
    meaning = [int(random.integers(len(choices))) for choices in _WORDS]
    query, answer = _text(meaning, random), _text(meaning, random)
    wrong = []
    for _ in range(WRONG):
        other, place = list(meaning), int(random.integers(len(_WORDS)))
        other[place] = (other[place] + int(random.integers(1, len(_WORDS[place])))) % len(_WORDS[place])
        wrong.append(_text(other, random))
    return {"query": query, "answer": answer, "wrong": wrong}


def _text(meaning: list[int], random: np.random.Generator) -> str:
    words = [str(random.choice(choices[index])) for choices, index in zip(_WORDS, meaning, strict=True)]
    return " ".join(f"{random.choice(['', 'a', 'with', 'and'])} {word}" for word in words)


_WORDS = (
    (("cheap", "inexpensive", "budget"), ("luxurious", "exclusive", "elegant"), ("family", "kids", "children")),
    (("hotel", "inn", "hostel"), ("apartment", "flat", "studio"), ("campsite", "camping", "tents")),
    (("sea", "beach", "coast"), ("mountains", "alps", "peaks"), ("downtown", "center", "city"), ("lake", "lakeside")),
    (("breakfast", "buffet"), ("pool", "swimming"), ("parking", "garage"), ("sauna", "spa"), ("bikes", "cycling")),
)


Path("data").mkdir(exist_ok=True)
for name, size in {"train": 1000, "validation": 200, "test": 400}.items():
    generator = np.random.default_rng(list(name.encode()))
    rows = [made_up_row(generator) for _ in range(size)]
    Path(f"data/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
