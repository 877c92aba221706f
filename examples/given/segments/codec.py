"""A PNG or JPEG → the model's pixels, as its library makes them → the class of each pixel of the picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from pictures import Array, fit_picture, read_picture, scale_pixels
from PIL import Image


class Codec:
    """An instance is a PNG or JPEG in base64, as in {"b64": "iVBORw0…"}; a prediction is a map of its classes.

    `values` are the numbers of classes, row by row, and `lengths` how often each is repeated:
    `numpy.repeat(values, lengths).reshape(height, width)`. `classes` has the share of each in the picture.
    """

    files = ("model.json",)
    requires = ("pillow",)
    media_types = ("image/png", "image/jpeg")  # a picture may also be the body of a request, as it is

    def __init__(self, folder: Path) -> None:
        model = json.loads((folder / "model.json").read_text())
        self.labels: list[str] = model["labels"]
        self.steps: dict[str, Any] = model["processor"]

    def decode(self, instances: Any) -> dict[str, Array]:
        pictures = [read_picture(instance) for instance in instances]
        sizes = np.array([(picture.height, picture.width) for picture in pictures])
        return {"pixel_values": np.stack([self.pixels(picture) for picture in pictures]), "sizes": sizes}

    def pixels(self, picture: Image.Image) -> Array:
        return scale_pixels(fit_picture(picture, self.steps), self.steps)

    def encode(self, outputs: dict[str, Array], inputs: dict[str, Array]) -> list[Any]:
        rows = zip(outputs["logits"], inputs["sizes"].tolist(), strict=True)
        return [self._describe(_best_classes(logits, *size)) for logits, size in rows]

    def _describe(self, numbers: Array) -> dict[str, Any]:
        flat = numbers.ravel()
        starts = np.flatnonzero(np.diff(flat, prepend=-1))
        counts = np.bincount(flat, minlength=len(self.labels))
        return {
            "height": numbers.shape[0],
            "width": numbers.shape[1],
            "values": flat[starts].tolist(),
            "lengths": np.diff(starts, append=flat.size).tolist(),
            "classes": [
                {"class": int(i), "label": self.labels[i], "share": float(counts[i] / flat.size)}
                for i in np.argsort(-counts, kind="stable")
                if counts[i]
            ],
        }


def _best_classes(logits: Array, height: int, width: int) -> Array:
    """Return the class with the highest score, [height, width], after linear interpolation of the scores."""
    down, across = _weights(logits.shape[1], height), _weights(logits.shape[2], width).T
    best, classes = np.full((height, width), -np.inf, np.float32), np.zeros((height, width), np.int64)
    for number, scores in enumerate(logits):  # one by one: all classes of a large picture need gigabytes
        enlarged = down @ scores @ across
        is_better = enlarged > best
        best[is_better], classes[is_better] = enlarged[is_better], number
    return classes


def _weights(size: int, pixels: int) -> Array:
    """Return how much each of `size` values counts for each pixel, as in torch's interpolate()."""
    places = np.clip((np.arange(pixels) + 0.5) * size / pixels - 0.5, 0, size - 1)
    return np.maximum(0, 1 - np.abs(places[:, None] - np.arange(size))).astype(np.float32)
