"""Pixels in, digit out; training and service use the same decoding."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline import Drawing, InvalidPayload


class DigitsCodec:
    """An instance is an 8×8 list of grey values from 0 to 16; a prediction is a digit with its probability."""

    page = Drawing(width=8, height=8, top=16, fit=True)  # instances are drawn on the service's page

    def decode(self, instances: Any) -> dict[str, np.ndarray[Any, Any]]:
        try:
            pixels = np.asarray(instances, dtype=np.float32)
        except (TypeError, ValueError) as error:
            raise InvalidPayload("instances: each must be an 8×8 list of numbers") from error
        if pixels.ndim != 3 or pixels.shape[1:] != (8, 8):
            raise InvalidPayload(f"instances: each must be an 8×8 list of numbers, found shape {pixels.shape[1:]}")
        if not ((pixels >= 0) & (pixels <= 16)).all():
            raise InvalidPayload("instances: grey values must lie between 0 and 16")
        return {"image": (pixels / 16)[:, None]}

    def encode(self, outputs: dict[str, np.ndarray[Any, Any]]) -> list[dict[str, Any]]:
        scores = np.exp(outputs["logits"] - outputs["logits"].max(axis=1, keepdims=True))
        probabilities = scores / scores.sum(axis=1, keepdims=True)
        return [
            {"digit": int(row.argmax()), "probability": float(row.max()), "probabilities": row.tolist()}
            for row in probabilities
        ]
