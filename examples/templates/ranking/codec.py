"""What clients send → arrays for the model → what they get back. Only numpy; training uses it too."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline import InvalidPayload

FEATURES = ("text_match", "price", "rating", "distance")  # replace: what is known of a query and an item


class Codec:
    """An instance is one item of a query; send the items of a query together and sort them by score."""

    def decode(self, instances: Any) -> dict[str, np.ndarray[Any, Any]]:
        try:
            rows = [[float(item[name]) for name in FEATURES] for item in instances]
        except (TypeError, ValueError, KeyError) as error:
            raise InvalidPayload(f"instances: each must be an object with the numbers {', '.join(FEATURES)}") from error
        features = np.array(rows, np.float32)
        if not np.isfinite(features).all():
            raise InvalidPayload("instances: every number must be finite")
        return {"features": features}

    def encode(self, outputs: dict[str, np.ndarray[Any, Any]]) -> list[Any]:
        return [{"score": float(score)} for score in outputs["score"]]
