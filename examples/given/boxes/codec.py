"""A PNG or JPEG → the model's pixels, as its library makes them → the things in it, each with a box."""

from __future__ import annotations

import base64
import binascii
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from pipeline import InvalidPayload

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

    def decode(self, instances: Any) -> dict[str, np.ndarray[Any, Any]]:
        pictures = [_picture(instance) for instance in instances]
        sizes = np.array([picture.size for picture in pictures], np.float32)
        return {"pixel_values": self.join([self.pixels(picture) for picture in pictures]), "sizes": sizes}

    def join(self, arrays: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
        """Join pictures, the smaller ones padded with zeros."""
        height, width = (max(array.shape[axis] for array in arrays) for axis in (1, 2))
        joined = np.zeros((len(arrays), 3, height, width), np.float32)
        for row, array in zip(joined, arrays, strict=True):
            row[:, : array.shape[1], : array.shape[2]] = array
        return joined

    def pixels(self, picture: Image.Image) -> np.ndarray[Any, Any]:
        """Resize and scale a picture, as the settings of an image processor say."""
        steps, picture = self.steps, picture.convert("RGB")
        if steps["do_resize"]:
            width, height = (side - side % self.multiple for side in _size(picture, steps["size"]))
            picture = picture.resize((width, height), steps["resample"])
        values = np.asarray(picture, np.float32)
        if steps["do_rescale"]:
            values = values * np.float32(steps["rescale_factor"])
        if steps["do_normalize"]:
            values = (values - np.float32(steps["image_mean"])) / np.float32(steps["image_std"])
        return values.transpose(2, 0, 1)

    def encode(self, outputs: dict[str, np.ndarray[Any, Any]], inputs: dict[str, np.ndarray[Any, Any]]) -> list[Any]:
        scores = np.exp(outputs["logits"] - outputs["logits"].max(axis=2, keepdims=True))
        scores = (scores / scores.sum(axis=2, keepdims=True))[:, :, :-1]  # the last class is "nothing"
        center, half = outputs["boxes"][..., :2], outputs["boxes"][..., 2:] / 2
        corners = np.concatenate([center - half, center + half], axis=2) * np.tile(inputs["sizes"], 2)[:, None]
        return [self._found(*row) for row in zip(scores, corners, strict=True)]

    def _found(self, scores: np.ndarray[Any, Any], corners: np.ndarray[Any, Any]) -> list[dict[str, Any]]:
        sides = ("xmin", "ymin", "xmax", "ymax")
        return [
            {"label": self.labels[row.argmax()], "score": float(row.max()), "box": dict(zip(sides, box, strict=True))}
            for row, box in zip(scores, corners.tolist(), strict=True)
            if row.max() > LEAST
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


def _picture(instance: Any) -> Image.Image:
    try:
        picture = Image.open(io.BytesIO(base64.b64decode(instance["b64"], validate=True)))
        picture.load()
    except (TypeError, KeyError, binascii.Error, UnidentifiedImageError, OSError) as error:
        raise InvalidPayload('instances: each must be {"b64": "a PNG or JPEG in base64"}') from error
    return picture
