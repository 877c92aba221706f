"""Pictures: read from requests, scaled as the image processors of transformers do it, and drawn as examples."""

from __future__ import annotations

import base64
import binascii
import io
import math
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from pipeline import InvalidPayload

Array = np.ndarray[Any, Any]


def read_picture(instance: Any) -> Image.Image:
    """Read {"b64": "iVBORw0…"}, a PNG or JPEG in base64."""
    try:
        return Image.open(io.BytesIO(base64.b64decode(instance["b64"], validate=True))).convert("RGB")
    except (TypeError, KeyError, binascii.Error, UnidentifiedImageError, OSError) as error:
        raise InvalidPayload('instances: each must be {"b64": "a PNG or JPEG in base64"}') from error


def write_picture(picture: Image.Image) -> dict[str, str]:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return {"b64": base64.b64encode(file.getvalue()).decode()}


def fit_picture(picture: Image.Image, steps: dict[str, Any]) -> Image.Image:
    """Resize and crop a picture, as the settings of an image processor state."""
    if steps.get("do_resize"):
        picture = picture.resize(_size(picture, steps["size"]), steps["resample"])
    if steps.get("do_center_crop"):  # the middle; what the picture lacks is black
        height, width = steps["crop_size"]["height"], steps["crop_size"]["width"]
        half = math.floor if "image_processor_type" in steps else round  # of transformers; of torchvision and timm
        left, top = half((picture.width - width) / 2), half((picture.height - height) / 2)
        picture = picture.crop((left, top, left + width, top + height))
    return picture


def scale_pixels(picture: Image.Image, steps: dict[str, Any]) -> Array:
    """Return the pixels as [3, height, width], scaled as the settings of an image processor state."""
    values = np.asarray(picture, np.float32)
    if steps.get("do_rescale"):
        values = values * np.float32(steps["rescale_factor"]) - bool(steps.get("rescale_offset"))
    if steps.get("do_normalize"):
        values = (values - np.float32(steps["image_mean"])) / np.float32(steps["image_std"])
    if steps.get("include_top"):  # of EfficientNet
        values = values / np.float32(steps["image_std"])
    if steps.get("do_flip_channel_order"):
        values = values[..., ::-1]
    return values.transpose(2, 0, 1)


def draw_pictures(count: int, least: int = 150, most: int = 400) -> list[Image.Image]:
    """Return pictures of waves and noise, with sides of `least` to `most` pixels."""
    rng = np.random.default_rng(0)
    pictures = []
    for number in range(count):
        width, height = rng.integers(least, most, 2)
        y, x = np.mgrid[:height, :width][..., None] / rng.uniform(5, 60, 3)
        waves = 127 + 80 * np.sin(x + number) * np.cos(y) + rng.normal(0, 20, (height, width, 3))
        pictures.append(Image.fromarray(waves.clip(0, 255).astype(np.uint8)))
    return pictures


def _size(picture: Image.Image, size: dict[str, int]) -> tuple[int, int]:
    """Return width and height; of "shortest_edge" the ratio of the picture is kept."""
    if "shortest_edge" not in size:
        return size["width"], size["height"]
    width, height = picture.size
    short, long = size["shortest_edge"], int(size["shortest_edge"] * max(width, height) / min(width, height))
    return (short, long) if width <= height else (long, short)
