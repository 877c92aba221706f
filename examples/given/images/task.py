"""A classifier of pictures with its weights as they are. To finetune it, return labelled data() and add loss()."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from codec import Codec
from model import answers, build, write_facts
from PIL import Image
from torch import nn

SAMPLES = 8  # pictures on which the ONNX file is compared with torch; replace: your own in data()


class Task:
    inputs = ("pixel_values",)
    outputs = ("logits",)

    def make_files(self, folder: Path) -> None:
        write_facts(folder)

    def use_files(self, folder: Path) -> None:
        self.folder, self.codec = folder, Codec(folder)

    def model(self) -> nn.Module:
        return build(self.folder)

    def adapt(self, folder: Path) -> nn.Module:
        return build(folder)

    def data(self, split: str) -> dict[str, Any]:
        return {"pixel_values": np.stack([self.codec.pixels(picture) for picture in _pictures(SAMPLES)])}

    def example(self) -> list[Any]:
        return [{"b64": _encode(picture)} for picture in _pictures(4)]

    def reference(self, instances: list[Any], model: nn.Module) -> list[Any]:
        """Return the answers of the library that the model comes from."""
        pictures = [Image.open(io.BytesIO(base64.b64decode(instance["b64"]))) for instance in instances]
        with torch.inference_mode():
            return answers(model, pictures, self.folder, self.codec.labels)


def _pictures(count: int) -> list[Image.Image]:
    """Return pictures of waves and noise, in several sizes."""
    rng = np.random.default_rng(0)
    pictures = []
    for number in range(count):
        width, height = rng.integers(150, 400, 2)
        y, x = np.mgrid[:height, :width][..., None] / rng.uniform(5, 60, 3)
        waves = 127 + 80 * np.sin(x + number) * np.cos(y) + rng.normal(0, 20, (height, width, 3))
        pictures.append(Image.fromarray(waves.clip(0, 255).astype(np.uint8)))
    return pictures


def _encode(picture: Image.Image) -> str:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
