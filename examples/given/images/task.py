"""A classifier of pictures with its weights as they are. To finetune it, return labelled data() and add loss()."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from codec import Codec
from model import answers, build, write_facts
from pictures import draw_pictures, read_picture, write_picture
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
        return {"pixel_values": np.stack([self.codec.pixels(picture) for picture in draw_pictures(SAMPLES)])}

    def example(self) -> list[Any]:
        return [write_picture(picture) for picture in draw_pictures(4)]

    def reference(self, instances: list[Any], model: nn.Module) -> list[Any]:
        """Return the answers of the library that the model comes from."""
        pictures = [read_picture(instance) for instance in instances]
        with torch.inference_mode():
            return answers(model, pictures, self.folder, self.codec.labels)
