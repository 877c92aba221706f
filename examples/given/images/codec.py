"""A PNG or JPEG → the model's pixels, as its library makes them → the classes with the highest scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from pictures import Array, fit_picture, read_picture, scale_pixels
from PIL import Image

MOST = 5  # classes of an answer


class Codec:
    """An instance is a PNG or JPEG in base64, as in {"b64": "iVBORw0…"}; a prediction is a list of classes."""

    files = ("model.json",)
    requires = ("pillow",)
    media_types = ("image/png", "image/jpeg")  # a picture may also be the body of a request, as it is

    def __init__(self, folder: Path) -> None:
        model = json.loads((folder / "model.json").read_text())
        self.labels: list[str] = model["labels"]
        self.steps: dict[str, Any] = model["processor"]

    def decode(self, instances: Any) -> dict[str, Array]:
        return {"pixel_values": np.stack([self.pixels(read_picture(instance)) for instance in instances])}

    def pixels(self, picture: Image.Image) -> Array:
        return scale_pixels(fit_picture(picture, self.steps), self.steps)

    def encode(self, outputs: dict[str, Array]) -> list[Any]:
        scores = np.exp(outputs["logits"] - outputs["logits"].max(axis=1, keepdims=True))
        scores /= scores.sum(axis=1, keepdims=True)
        best = np.argsort(-scores, axis=1, kind="stable")[:, :MOST]
        return [
            [{"label": self.labels[i], "score": float(row[i])} for i in order]
            for row, order in zip(scores, best, strict=True)
        ]
