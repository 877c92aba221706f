"""A model with its weights as they are. To finetune it, return labelled data() and add loss() and metrics()."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from codec import Codec
from model import build
from torch import nn

FACTS = Path(__file__).parent / "model.json"  # inputs, outputs and the longest of each named axis
SAMPLES = 32  # on which the ONNX file is compared with torch; replace: your own in data()


class Task:
    _facts = json.loads(FACTS.read_text())
    inputs = tuple(_facts["inputs"])
    outputs = tuple(_facts["outputs"])
    if _facts["longest"]:
        axes = {name: tuple(facts["axes"]) for name, facts in _facts["inputs"].items()}
        longest = _facts["longest"]

    def make_files(self, folder: Path) -> None:
        shutil.copyfile(FACTS, folder / "model.json")

    def use_files(self, folder: Path) -> None:
        self.codec = Codec(folder)

    def model(self) -> nn.Module:
        return build()

    def data(self, split: str) -> Any:
        """Return inputs drawn over the range of each: normal numbers, or whole ones between its limits."""
        rng = np.random.default_rng(0)
        if not self._facts["longest"]:
            return {name: _draw(rng, facts, {"batch": SAMPLES}) for name, facts in self._facts["inputs"].items()}
        sizes = [_sizes(rng, self._facts["longest"], part) for part in np.linspace(0.4, 1, SAMPLES)]
        return [{name: _draw(rng, facts, of)[0] for name, facts in self._facts["inputs"].items()} for of in sizes]

    def collate(self, samples: Any) -> Any:
        """Join samples, the shorter ones padded with zeros."""
        arrays = self.codec.join([{name: np.asarray(value) for name, value in sample.items()} for sample in samples])
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def example(self) -> list[Any]:
        rng, longest = np.random.default_rng(1), self._facts["longest"]
        sizes = [_sizes(rng, longest, part) for part in (0.4, 0.7)]
        return [
            {name: _draw(rng, facts, of)[0].tolist() for name, facts in self._facts["inputs"].items()} for of in sizes
        ]


def _sizes(rng: np.random.Generator, longest: dict[str, int], part: float) -> dict[str, int]:
    return {"batch": 1, **{axis: max(1, int(size * part * rng.uniform(0.5, 1))) for axis, size in longest.items()}}


def _draw(rng: np.random.Generator, facts: Any, sizes: dict[str, int]) -> np.ndarray[Any, Any]:
    shape = [sizes[axis] if isinstance(axis, str) else axis for axis in facts["axes"]]
    if facts["dtype"].startswith("float"):
        return rng.normal(size=shape).astype(facts["dtype"])
    return rng.integers(facts["low"], facts["high"] + 1, shape).astype(facts["dtype"])
