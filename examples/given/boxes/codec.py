"""A PNG or JPEG → the model's pixels, as its library makes them → the things in it, each with a box."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from pictures import Array, read_picture, scale_pixels
from PIL import Image

LEAST = 0.5  # score of what is in an answer


class Codec:
    """An instance is a PNG or JPEG in base64; a prediction is a list of boxes in pixels of the picture."""

    files = ("model.json",)
    requires = ("pillow",)
    media_types = ("image/png", "image/jpeg")  # a picture may also be the body of a request, as it is

    def __init__(self, folder: Path) -> None:
        model = json.loads((folder / "model.json").read_text())
        self.labels: list[str] = model["labels"]
        self.steps: dict[str, Any] = model["processor"]
        self.multiple: int = model["multiple"]
        self.most: int = model["most"]

    def decode(self, instances: Any) -> dict[str, Array]:
        pictures = [read_picture(instance) for instance in instances]
        sizes = np.array([picture.size for picture in pictures], np.float32)
        return {"pixel_values": self.join([self.pixels(picture) for picture in pictures]), "sizes": sizes}

    def join(self, arrays: list[Array]) -> Array:
        """Join pictures, the smaller ones padded with zeros."""
        height, width = (max(array.shape[axis] for array in arrays) for axis in (1, 2))
        joined = np.zeros((len(arrays), 3, height, width), np.float32)
        for row, array in zip(joined, arrays, strict=True):
            row[:, : array.shape[1], : array.shape[2]] = array
        return joined

    def pixels(self, picture: Image.Image) -> Array:
        """Resize and scale a picture, as the settings of an image processor say."""
        if self.steps.get("do_resize"):
            width, height = (side - side % self.multiple for side in _size(picture, self.steps["size"]))
            picture = picture.resize((width, height), self.steps["resample"])
        return scale_pixels(picture, self.steps)

    def encode(self, outputs: dict[str, Array], inputs: dict[str, Array]) -> list[Any]:
        center, half = outputs["boxes"][..., :2], outputs["boxes"][..., 2:] / 2
        corners = np.concatenate([center - half, center + half], axis=2) * np.tile(inputs["sizes"], 2)[:, None]
        return [self._things(*row) for row in zip(outputs["logits"], corners, strict=True)]

    def _things(self, logits: Array, corners: Array) -> list[dict[str, Any]]:
        sides = ("xmin", "ymin", "xmax", "ymax")
        if self.most:  # each class of each box has a chance of its own
            scores = 1 / (1 + np.exp(-logits))
            places = np.argsort(-scores, axis=None, kind="stable")[: self.most]
            found = [divmod(place, scores.shape[1]) for place in places.tolist()]
        else:
            scores = np.exp(logits - logits.max(axis=1, keepdims=True))
            scores = (scores / scores.sum(axis=1, keepdims=True))[:, :-1]  # the last class is "nothing"
            found = list(enumerate(scores.argmax(axis=1).tolist()))
        return [
            {
                "label": self.labels[label],
                "score": float(scores[row, label]),
                "box": dict(zip(sides, corners[row].tolist(), strict=True)),
            }
            for row, label in found
            if scores[row, label] > LEAST
        ]


def _size(picture: Image.Image, size: dict[str, int]) -> tuple[int, int]:
    """Return width and height; of edges the ratio of the picture is kept."""
    if "shortest_edge" not in size:
        return size["width"], size["height"]
    short, long = sorted(picture.size)
    edge = float(size["shortest_edge"])
    if long / short * edge > size["longest_edge"]:
        edge = size["longest_edge"] * short / long
    if round(edge) == short:
        return picture.size
    if picture.width < picture.height:
        return round(edge), int(edge * picture.height / picture.width)
    return int(edge * picture.width / picture.height), round(edge)
