"""Lists of numbers by the name of an input → arrays → lists of numbers by the name of an output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from pipeline import InvalidPayload


class Codec:
    """An instance has a list for each input, as in {"x": [0.5, 1.5]}; a prediction has one for each output."""

    files = ("model.json",)

    def __init__(self, folder: Path) -> None:
        self.inputs: dict[str, Any] = json.loads((folder / "model.json").read_text())["inputs"]

    def decode(self, instances: Any) -> dict[str, np.ndarray[Any, Any]]:
        return self.join([self._arrays(instance) for instance in instances])

    def join(self, samples: list[dict[str, np.ndarray[Any, Any]]]) -> dict[str, np.ndarray[Any, Any]]:
        """Join samples, the shorter ones padded with zeros."""
        joined = {}
        for name in self.inputs:
            arrays = [sample[name] for sample in samples]
            shape = tuple(map(max, zip(*(array.shape for array in arrays), strict=True)))
            joined[name] = np.zeros((len(arrays), *shape), arrays[0].dtype)
            for row, array in zip(joined[name], arrays, strict=True):
                row[tuple(map(slice, array.shape))] = array
        return joined

    def _arrays(self, instance: Any) -> dict[str, np.ndarray[Any, Any]]:
        try:
            arrays = {name: np.asarray(instance[name], facts["dtype"]) for name, facts in self.inputs.items()}
        except (TypeError, KeyError, ValueError, OverflowError) as error:
            raise InvalidPayload(f"instances: each needs numbers for {', '.join(self.inputs)} ({error})") from error
        for name, facts in self.inputs.items():
            shape, axes = arrays[name].shape, facts["axes"][1:]
            if len(shape) != len(axes) or any(
                isinstance(axis, int) and axis != size for axis, size in zip(axes, shape, strict=True)
            ):
                raise InvalidPayload(f"instances: `{name}` must have the shape {axes}, not {list(shape)}")
        return arrays

    def encode(self, outputs: dict[str, np.ndarray[Any, Any]]) -> list[Any]:
        columns = {name: array.tolist() for name, array in outputs.items()}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
