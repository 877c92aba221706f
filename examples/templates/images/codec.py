"""What clients send → arrays for the model → what they get back. No torch; training uses it too."""

from __future__ import annotations

import base64
import binascii
import io
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from pipeline import InvalidPayload

CLASSES = ("circle", "square", "triangle")  # replace: your classes
SIZE = 32  # pixels; replace: the size that your model takes, such as 224


class Codec:
    """An instance is a PNG or JPEG in base64, as in {"b64": "iVBORw0…"}; a prediction is a class."""

    requires = ("pillow",)  # packages besides numpy that the service needs
    media_types = ("image/png", "image/jpeg")  # a picture may also be the body of a request, as it is

    def decode(self, instances: Any) -> dict[str, np.ndarray[Any, Any]]:
        return self.pixels([_picture(instance) for instance in instances])

    def pixels(self, pictures: list[Image.Image]) -> dict[str, np.ndarray[Any, Any]]:
        """Resize and scale pictures; training calls this as well."""
        resized = [picture.convert("RGB").resize((SIZE, SIZE)) for picture in pictures]
        rows = np.stack([np.asarray(picture, np.float32) for picture in resized])
        return {"image": (rows / 255 - 0.5).transpose(0, 3, 1, 2) * 4}  # channels first, about -2 to 2

    def encode(self, outputs: dict[str, np.ndarray[Any, Any]]) -> list[Any]:
        scores = np.exp(outputs["logits"] - outputs["logits"].max(axis=1, keepdims=True))
        probabilities = scores / scores.sum(axis=1, keepdims=True)
        return [{"class": CLASSES[row.argmax()], "probability": float(row.max())} for row in probabilities]


def _picture(instance: Any) -> Image.Image:
    try:
        picture = Image.open(io.BytesIO(base64.b64decode(instance["b64"], validate=True)))
        picture.load()
    except (TypeError, KeyError, binascii.Error, UnidentifiedImageError, OSError) as error:
        raise InvalidPayload('instances: each must be {"b64": "a PNG or JPEG in base64"}') from error
    return picture
