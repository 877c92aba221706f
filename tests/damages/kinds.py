"""The kinds of models: how their data are drawn, and what their projects require."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Columns = dict[str, Array]
Splits = dict[str, Columns]
FEATURES = 12
MEANS = np.linspace(-1, 2, FEATURES)
SPREADS = np.linspace(0.5, 2, FEATURES)
_NATURE = np.random.default_rng(11)  # draws what all data of a kind share
_CLASS_WEIGHTS = _NATURE.normal(size=(FEATURES, 3))
_WEIGHTS = _NATURE.normal(size=FEATURES)
_PROJECTION = _NATURE.normal(size=(FEATURES, 4))
_WORD_TAGS = _NATURE.integers(0, 3, 40)
_FOLLOWING = _NATURE.dirichlet(np.full(40, 0.08), 40)


@dataclass(frozen=True)
class Kind:
    name: str
    task: str  # class in project/task.py
    draw: Callable[[np.random.Generator, int], Columns]
    evaluate: Mapping[str, Any]
    samples: int = 400  # of the test set; the training set has twice as many

    @property
    def codec(self) -> str:
        return f"{'Regress' if self.task in ('Small', 'Large') else self.task}Codec"

    def splits(self, seed: int = 0, samples: int = 0) -> Splits:
        rng, count = np.random.default_rng([seed, 5]), samples or self.samples
        sizes = {"train": 2 * count, "validation": count // 2, "test": count}
        return {split: self.draw(rng, size) for split, size in sizes.items()}


def _numbers(rng: np.random.Generator, count: int) -> Array:
    return rng.normal(MEANS, SPREADS, size=(count, FEATURES)).astype(np.float32)


def _standard(x: Array) -> Array:
    standard: Array = (x - MEANS) / SPREADS
    return standard


def _classes(rng: np.random.Generator, count: int) -> Columns:
    x = _numbers(rng, count)
    scores = _standard(x) @ _CLASS_WEIGHTS + rng.gumbel(size=(count, 3))
    return {"x": x, "label": scores.argmax(axis=1)}


def _numbers_in(unit: float) -> Callable[[np.random.Generator, int], Columns]:
    def draw(rng: np.random.Generator, count: int) -> Columns:
        x = _numbers(rng, count)
        return {"x": x, "target": (unit * (_standard(x) @ _WEIGHTS + rng.normal(size=count))).astype(np.float32)}

    return draw


def _lists(rng: np.random.Generator, count: int) -> Columns:
    x = _numbers(rng, count)
    relevance = np.clip(np.round(_standard(x) @ _WEIGHTS / 3 + 1 + 0.3 * rng.normal(size=count)), 0, 3)
    return {"x": x, "relevance": relevance.astype(np.int64), "query": np.arange(count) // 8}


def _sentences(rng: np.random.Generator, count: int) -> Columns:
    """Words 30 to 39 do not occur, but the vocabulary has them."""
    words, lengths = rng.integers(1, 30, size=(count, 12)), rng.integers(5, 13, size=count)
    mask = (np.arange(12) < lengths[:, None]).astype(np.int64)
    tags = _WORD_TAGS[words]
    tags[:, 1:][words[:, :-1] < 4] = 3
    wrong = rng.random(tags.shape) < 0.03
    tags = np.where(wrong, rng.integers(0, 4, tags.shape), tags)
    return {"input_ids": words * mask, "attention_mask": mask, "tags": tags * mask}


def _partners(rng: np.random.Generator, count: int) -> Columns:
    x = _numbers(rng, count)
    partner = _standard(x) @ _PROJECTION + 0.5 * rng.normal(size=(count, 4))
    return {"x": x, "partner": (partner / np.linalg.norm(partner, axis=1, keepdims=True)).astype(np.float32)}


def _texts(rng: np.random.Generator, count: int) -> Columns:
    ids = np.empty((count, 10), np.int64)
    ids[:, 0] = rng.integers(1, 40, count)
    ends = _FOLLOWING.cumsum(axis=1)
    for place in range(1, 10):
        ids[:, place] = np.minimum((rng.random((count, 1)) > ends[ids[:, place - 1]]).sum(axis=1), 39)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def _regression(unit: float) -> dict[str, Any]:
    return {
        "metric": "error",
        "rule": "non-inferior",
        "margin": 0.1 * unit,
        "require": {"error": 1.2 * unit, "r2": 0.8},
    }


KINDS = {
    kind.name: kind
    for kind in (
        Kind(
            "classifier",
            "Classify",
            _classes,
            {"rule": "non-inferior", "margin": 0.06, "require": {"accuracy": 0.75, "ece": 0.1, "brier_margin": 0.05}},
        ),
        Kind("regressor 1e-5", "Small", _numbers_in(1e-5), _regression(1e-5)),
        Kind("regressor 1e6", "Large", _numbers_in(1e6), _regression(1e6)),
        Kind(
            "ranker",
            "Rank",
            _lists,
            {"metric": "ndcg", "rule": "non-inferior", "margin": 0.05, "require": {"ndcg": 0.95}},
            800,
        ),
        Kind("tagger", "Tag", _sentences, {"rule": "non-inferior", "margin": 0.05, "require": {"accuracy": 0.85}}, 150),
        Kind(
            "embedding",
            "Embed",
            _partners,
            {"metric": "cosine", "rule": "non-inferior", "margin": 0.05, "require": {"cosine": 0.85}},
        ),
        Kind(
            "language model",
            "Talk",
            _texts,
            {"metric": "log_likelihood", "rule": "non-inferior", "margin": 0.3, "require": {"log_likelihood": -2.5}},
            150,
        ),
    )
}
