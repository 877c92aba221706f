"""A PNG or JPEG → the model's pixels, as its library makes them → the classes with the highest scores."""

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

    def decode(self, instances: Any) -> dict[str, np.ndarray[Any, Any]]:
        return {"pixel_values": np.stack([self.pixels(_picture(instance)) for instance in instances])}

    def pixels(self, picture: Image.Image) -> np.ndarray[Any, Any]:
        """Resize, crop and scale a picture, as the settings of an image processor say."""
        steps, picture = self.steps, picture.convert("RGB")
        if steps.get("do_resize"):
            picture = picture.resize(_size(picture, steps["size"]), steps["resample"])
        if steps.get("do_center_crop"):
            picture = _crop(picture, steps["crop_size"]["height"], steps["crop_size"]["width"])
        values = np.asarray(picture, np.float32)
        if steps.get("do_rescale"):
            values = values * np.float32(steps["rescale_factor"])
        if steps.get("do_normalize"):
            values = (values - np.float32(steps["image_mean"])) / np.float32(steps["image_std"])
        return values.transpose(2, 0, 1)

    def encode(self, outputs: dict[str, np.ndarray[Any, Any]]) -> list[Any]:
        scores = np.exp(outputs["logits"] - outputs["logits"].max(axis=1, keepdims=True))
        scores /= scores.sum(axis=1, keepdims=True)
        best = np.argsort(-scores, axis=1, kind="stable")[:, :MOST]
        return [
            [{"label": self.labels[i], "score": float(row[i])} for i in order]
            for row, order in zip(scores, best, strict=True)
        ]


def _size(picture: Image.Image, size: dict[str, int]) -> tuple[int, int]:
    """Return width and height; of "shortest_edge" the ratio of the picture is kept."""
    if "shortest_edge" not in size:
        return size["width"], size["height"]
    width, height = picture.size
    short, long = size["shortest_edge"], int(size["shortest_edge"] * max(width, height) / min(width, height))
    return (short, long) if width <= height else (long, short)


def _crop(picture: Image.Image, height: int, width: int) -> Image.Image:
    """Return the middle; what the picture lacks is black."""
    left, top = round((picture.width - width) / 2), round((picture.height - height) / 2)
    return picture.crop((left, top, left + width, top + height))


def _picture(instance: Any) -> Image.Image:
    try:
        picture = Image.open(io.BytesIO(base64.b64decode(instance["b64"], validate=True)))
        picture.load()
    except (TypeError, KeyError, binascii.Error, UnidentifiedImageError, OSError) as error:
        raise InvalidPayload('instances: each must be {"b64": "a PNG or JPEG in base64"}') from error
    return picture
