"""Golden requests: what was asked at export and answered then, and must be answered the same for ever."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.spec.files import write_json

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Golden:
    """Tensors by name for the raw protocol; instances and predictions for the codec's (both may be empty lists)."""

    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    instances: list[Any]
    predictions: list[Any]
    rtol: float
    atol: float
    # Of a language model: ids of a prompt and of its greedy answer, up to the first token that is nearly a tie.
    generated: list[dict[str, list[int]]] = field(default_factory=list)

    def write(self, directory: Path) -> None:
        arrays = {f"input.{name}": array for name, array in self.inputs.items()}
        arrays |= {f"output.{name}": array for name, array in self.outputs.items()}
        np.savez(directory / "golden.npz", allow_pickle=False, **{name: _plain(one) for name, one in arrays.items()})
        body = {
            "rtol": self.rtol,
            "atol": self.atol,
            "instances": self.instances,
            "predictions": self.predictions,
        } | ({"generated": self.generated} if self.generated else {})
        write_json(directory / "golden.json", body)

    @classmethod
    def read(cls, directory: Path) -> Golden:
        body = json.loads((directory / "golden.json").read_text())
        with np.load(directory / "golden.npz", allow_pickle=False) as arrays:
            tensors = {name: _texts(arrays[name]) for name in arrays.files}
        return cls(
            inputs={name[6:]: array for name, array in tensors.items() if name.startswith("input.")},
            outputs={name[7:]: array for name, array in tensors.items() if name.startswith("output.")},
            **body,
        )


def _plain(array: Array) -> Array:
    """Texts are objects to ONNX Runtime, and objects would be pickled."""
    return array.astype(np.str_) if array.dtype == np.object_ else array


def _texts(array: Array) -> Array:
    return array.astype(np.object_) if array.dtype.kind == "U" else array


def difference(expected: Any, found: Any, rtol: float, atol: float, place: str = "") -> str | None:
    """Where two JSON values part: numbers within tolerance, everything else exactly. None when they agree."""
    if isinstance(expected, float | int) and not isinstance(expected, bool):
        if isinstance(found, bool) or not isinstance(found, float | int):
            return f"{place or 'answer'}: expected the number {expected}, found {found!r}"
        close = bool(np.isclose(found, expected, rtol=rtol, atol=atol))
        return None if close else f"{place or 'answer'}: expected {expected}, found {found}"
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs: list[tuple[Any, Any, str]] = [
            (a, b, f"{place}[{i}]") for i, (a, b) in enumerate(zip(expected, found, strict=True))
        ]
    elif isinstance(expected, dict) and isinstance(found, dict) and expected.keys() == found.keys():
        pairs = [(expected[key], found[key], f"{place}.{key}".lstrip(".")) for key in expected]
    else:
        same = expected == found and isinstance(expected, bool) == isinstance(found, bool)  # Python's True equals 1
        return None if same else f"{place or 'answer'}: expected {expected!r}, found {found!r}"
    return next((text for a, b, where in pairs if (text := difference(a, b, rtol, atol, where))), None)
