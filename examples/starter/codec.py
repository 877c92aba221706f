"""Your codec: what clients send → arrays for the model → what they get back. numpy only."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline import InvalidPayload

MEAN = np.array([13, 2.3, 2.4, 19, 100, 2.3, 2, 0.36, 1.6, 5, 0.96, 2.6, 750], dtype=np.float32)
SCALE = np.array([0.8, 1.1, 0.3, 3.3, 14, 0.6, 1, 0.12, 0.6, 2.3, 0.23, 0.7, 315], dtype=np.float32)
NAMES = ("barolo", "grignolino", "barbera")


class Codec:
    def decode(self, instances: Any) -> dict[str, np.ndarray[Any, Any]]:
        """One array for each input of the model; raise InvalidPayload to reject a request."""
        try:
            features = np.asarray(instances, dtype=np.float32)
        except (TypeError, ValueError) as error:
            raise InvalidPayload("instances: each must be a list of 13 numbers") from error
        if features.ndim != 2 or features.shape[1] != 13:
            raise InvalidPayload(f"instances: each must be a list of 13 numbers, found shape {features.shape[1:]}")
        if not np.isfinite(features).all():
            raise InvalidPayload("instances: every number must be finite")
        return {"features": (features - MEAN) / SCALE}

    def encode(self, outputs: dict[str, np.ndarray[Any, Any]]) -> list[Any]:
        """One JSON value for each instance."""
        return [{"class": NAMES[int(row.argmax())], "scores": row.tolist()} for row in outputs["scores"]]
