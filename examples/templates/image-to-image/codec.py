"""What clients send → arrays for the model → what they get back. No torch; training uses it too."""

from __future__ import annotations

import base64
import binascii
import io
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from pipeline import InvalidPayload

LONGEST = 256  # pixels of a side; replace: the largest pictures that you serve


class Codec:
    """Instances and predictions are pictures in base64, as in {"b64": "iVBORw0…"}; answers are PNG."""

    requires = ("pillow",)  # packages besides numpy that the service needs
    media_types = ("image/png", "image/jpeg")  # a picture may also be the body of a request, as it is

    def decode(self, instances: Any) -> dict[str, np.ndarray[Any, Any]]:
        pictures = [_read(instance) for instance in instances]
        if len({picture.shape for picture in pictures}) > 1:
            raise InvalidPayload("instances: the pictures of a request must have equal sizes")
        return self.pixels(np.stack(pictures))

    def pixels(self, pictures: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
        """Scale pictures of 0 to 255 to 0 to 1, and put the channels first; training calls this as well."""
        return {"image": (pictures.astype(np.float32) / 255).transpose(0, 3, 1, 2)}

    def encode(self, outputs: dict[str, np.ndarray[Any, Any]]) -> list[Any]:
        pictures = (outputs["clean"].transpose(0, 2, 3, 1) * 255).round().clip(0, 255).astype(np.uint8)
        return [to_png(picture) for picture in pictures]


def to_png(picture: np.ndarray[Any, Any]) -> dict[str, str]:
    Image.fromarray(picture).save(file := io.BytesIO(), "PNG")
    return {"b64": base64.b64encode(file.getvalue()).decode()}


def _read(instance: Any) -> np.ndarray[Any, Any]:
    try:
        picture = Image.open(io.BytesIO(base64.b64decode(instance["b64"], validate=True))).convert("RGB")
    except (TypeError, KeyError, binascii.Error, UnidentifiedImageError, OSError) as error:
        raise InvalidPayload('instances: each must be {"b64": "a PNG or JPEG in base64"}') from error
    if not 8 <= min(picture.size) <= max(picture.size) <= LONGEST:
        raise InvalidPayload(f"instances: the sides of a picture must have 8 to {LONGEST} pixels")
    return np.asarray(picture)
