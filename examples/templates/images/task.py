"""Classify pictures: shapes that the task draws itself. Replace data() and model()."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import torch
from codec import CLASSES, SIZE, Codec
from PIL import Image, ImageDraw
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn import functional


class Task:
    inputs = ("image",)  # columns of data() that the model takes, in order
    outputs = ("logits",)  # names for what it returns
    classes = CLASSES

    def model(self) -> nn.Module:
        # Replace: your network, for example `torchvision.models.resnet18(num_classes=len(CLASSES))`.
        layers: list[nn.Module] = []
        for channels, wider in ((3, 16), (16, 32), (32, 64)):
            layers += [nn.Conv2d(channels, wider, 3, padding=1), nn.BatchNorm2d(wider), nn.ReLU(), nn.MaxPool2d(2)]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, len(CLASSES)))

    def data(self, split: str) -> dict[str, np.ndarray[Any, Any]]:
        # Replace: read your pictures and their labels, for example with `pipeline.read_images(f"pictures/{split}")`.
        random = np.random.default_rng(list(split.encode()))
        labels = random.integers(0, len(CLASSES), {"train": 1500, "validation": 300, "test": 600}[split])
        pictures = [_drawing(CLASSES[label], random) for label in labels]
        return {**Codec().pixels(pictures), "label": labels}

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(outputs, batch["label"])

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"accuracy": (self.predicted(outputs) == batch["label"]).float()}

    # With these and `classes`, the report has metrics per class, a confusion matrix and the calibration.
    def predicted(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(dim=1)

    def actual(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["label"]

    def probabilities(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(dim=1)

    # Optional: what the report shows of a sample.
    def show(self, batch: dict[str, Tensor], outputs: Tensor) -> list[dict[str, Any]]:
        answers = [CLASSES[index] for index in self.predicted(outputs).tolist()]
        return [{"picture": image, "answer": answer} for image, answer in zip(batch["image"], answers, strict=True)]

    # Optional: the model that yours must beat.
    def baseline(self) -> Any:
        """Return a logistic regression of every fourth pixel."""
        train = self.data("train")
        pixels = train["image"][:, :, ::4, ::4].reshape(len(train["image"]), -1)
        fitted = LogisticRegression(max_iter=1000).fit(pixels, train["label"])
        return lambda batch: torch.from_numpy(
            fitted.predict_log_proba(batch["image"][:, :, ::4, ::4].flatten(1).numpy())
        ).float()

    # Optional: instances as a client would send them; they become golden requests.
    def example(self) -> list[Any]:
        random, instances = np.random.default_rng(0), []
        for name in CLASSES:
            _drawing(name, random).save(file := io.BytesIO(), "PNG")
            instances.append({"b64": base64.b64encode(file.getvalue()).decode()})
        return instances


def _drawing(name: str, random: np.random.Generator) -> Image.Image:
    """Draw a bright shape of any size, place and color on a dark, noisy background."""
    noise = random.normal(random.uniform(20, 90, 3), 20, (SIZE, SIZE, 3))
    picture = Image.fromarray(noise.clip(0, 255).astype(np.uint8))
    radius = random.uniform(7, 13)
    x, y = random.uniform(radius + 1, SIZE - radius - 1, 2)
    color, draw = tuple(random.integers(130, 256, 3).tolist()), ImageDraw.Draw(picture)
    if name == "circle":
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=color)
    else:
        draw.regular_polygon((x, y, radius), 4 if name == "square" else 3, random.uniform(0, 360), fill=color)
    return picture
