"""What clients send → arrays for the model → what they get back. Only numpy; training uses it too."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline import InvalidPayload

NUMBERS = ("area", "rooms", "floor", "year")  # replace: your columns with numbers
CHOICES = {"district": ("center", "north", "harbor", "hills")}  # replace: your columns with texts, and their values


class Codec:
    """An instance is a row, as in {"area": 54, "rooms": 2, "district": "north"}; what is missing or null is unknown."""

    def decode(self, instances: Any) -> dict[str, np.ndarray[Any, Any]]:
        return {"features": np.array([self._features(row) for row in instances], np.float32)}

    def encode(self, outputs: dict[str, np.ndarray[Any, Any]]) -> list[Any]:
        return [{"rent": round(float(rent), 2)} for rent in outputs["rent"]]

    def _features(self, row: Any) -> list[float]:
        if not isinstance(row, dict) or (unknown := row.keys() - {*NUMBERS, *CHOICES}):
            extra = f"; found {', '.join(sorted(unknown))}" if isinstance(row, dict) else ""
            raise InvalidPayload(f"instances: each must be an object with {', '.join((*NUMBERS, *CHOICES))}{extra}")
        features = [_number(name, row.get(name)) for name in NUMBERS]
        for name, values in CHOICES.items():  # one column for each value
            features += [float(row.get(name) == value) for value in values]
        return features


def _number(name: str, value: Any) -> float:
    if value is None:
        return float("nan")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidPayload(f"instances: {name} must be a number or null, found {value!r}")
    return float(value)
