"""Classify pictures by their shape. Replace data/ and model()."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from codec import CLASSES, Codec
from PIL import Image
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn import functional

from pipeline import read_images


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
        pictures = read_images(f"data/{split}", transform=lambda picture: Codec().pixels([picture])["image"][0])
        # In memory, because there are few. Return `pictures` itself if there are many: they are read when needed.
        return {"image": np.stack([row["image"] for row in pictures]), "label": np.array(pictures.labels)}

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

    # Optional: test samples as a client would send them, and the answer in a prediction. With these two, the gate
    # compares the codec with the test data.
    def instances(self, batch: dict[str, Tensor]) -> list[Any]:
        pixels = ((batch["image"] / 4 + 0.5) * 255).round().byte().permute(0, 2, 3, 1).numpy()
        return [_to_png(Image.fromarray(picture)) for picture in pixels]

    def answer(self, prediction: Any) -> Any:
        return prediction["class"]

    # Optional: instances as a client would send them; they become golden requests.
    def example(self) -> list[Any]:
        return [_to_png(Image.open(min(Path("data/test", name).iterdir()))) for name in CLASSES]


def _to_png(picture: Image.Image) -> dict[str, str]:
    picture.save(file := io.BytesIO(), "PNG")
    return {"b64": base64.b64encode(file.getvalue()).decode()}
