"""Make up reviews: data/train.jsonl, validation.jsonl and test.jsonl. Replace these by your own texts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np


def made_up_review(random: np.random.Generator) -> tuple[str, int]:
    """Return one or two opinions of the same kind; a word such as "not" turns a word into its opposite."""
    label, opinions = int(random.integers(2)), []
    for thing in random.choice(_THINGS, random.integers(1, 3), replace=False):
        negated = random.random() < 0.5
        words = _PRAISE if (label == 1) != negated else _COMPLAINTS
        adverb = random.choice(["not", "never", "hardly"] if negated else ["always", "very", "really", "so"])
        opinions.append(f"the {thing} was {adverb} {random.choice(words)}")
    return " and ".join(opinions), label


_THINGS = ("soup", "room", "waiter", "view", "bed", "breakfast", "music", "wine", "garden", "price", "pool", "lobby")
_PRAISE = ("charming", "clean", "fresh", "friendly", "lovely", "perfect", "quiet", "wonderful")
_COMPLAINTS = ("awful", "boring", "cold", "dirty", "noisy", "rude", "stale", "terrible")


generator = np.random.default_rng(0)
reviews = list(dict.fromkeys(made_up_review(generator) for _ in range(2400)))
Path("data").mkdir(exist_ok=True)
for name, part in {"train": slice(1000), "validation": slice(1000, 1300), "test": slice(1300, 1900)}.items():
    rows = [{"text": text, "class": ("bad", "good")[label]} for text, label in reviews[part]]
    Path(f"data/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
