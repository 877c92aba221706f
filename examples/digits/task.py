"""Handwritten digits: 8×8 images from scikit-learn, a small convolutional net, logistic regression as baseline."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from codec import DigitsCodec
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional

THIN, THICK = 0.286, 0.321  # mean grey values that divide the images into thirds


class Shift(nn.Module):
    """Augmentation: shift each image by up to one pixel during training."""

    def forward(self, image: Tensor) -> Tensor:
        if not self.training:
            return image
        down, right = torch.randint(-1, 2, (2, len(image), 1), device=image.device)
        rows = (torch.arange(image.shape[2], device=image.device) + down).clamp(0, image.shape[2] - 1)
        columns = (torch.arange(image.shape[3], device=image.device) + right).clamp(0, image.shape[3] - 1)
        sample = torch.arange(len(image), device=image.device)
        return image[sample[:, None, None], 0, rows[:, :, None], columns[:, None, :]][:, None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = Shift()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout2d(0.1),
        )
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 10)
        )

    def forward(self, image: Tensor) -> Tensor:
        scores: Tensor = self.head(self.features(self.shift(image)))
        return scores


class Digits:
    inputs = ("image",)
    outputs = ("logits",)
    classes = tuple("0123456789")

    def model(self) -> nn.Module:
        return Net()

    def data(self, split: str) -> dict[str, np.ndarray[Any, Any]]:
        pixels, labels = self._splits[split]
        return {**DigitsCodec().decode(pixels), "label": labels}

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(outputs, batch["label"])

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        log_probability = functional.log_softmax(outputs, dim=1).gather(1, batch["label"][:, None])[:, 0]
        return {"accuracy": (self.predicted(outputs) == batch["label"]).float(), "log_likelihood": log_probability}

    def predicted(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(dim=1)

    def actual(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["label"]

    def probabilities(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(dim=1)

    def slices(self, batch: dict[str, Tensor]) -> dict[str, list[str]]:
        """Evaluate thin, middle and thick strokes separately."""
        darkness = batch["image"].mean(dim=(1, 2, 3))
        return {
            "stroke": ["thin" if mean < THIN else "thick" if mean > THICK else "middling" for mean in darkness.tolist()]
        }

    def baseline(self) -> Any:
        train = self.data("train")
        classifier = LogisticRegression(max_iter=1000).fit(train["image"].reshape(-1, 64), train["label"])

        def predict(batch: dict[str, Tensor]) -> Tensor:
            return torch.from_numpy(classifier.predict_log_proba(batch["image"].reshape(-1, 64).numpy())).float()

        return predict

    def instances(self, batch: dict[str, Tensor]) -> list[Any]:
        return (batch["image"][:, 0] * 16).tolist()

    def answer(self, prediction: Any) -> Any:
        return prediction["digit"]

    def example(self) -> list[Any]:
        pixels, _ = self._splits["test"]
        return [picture.astype(int).tolist() for picture in pixels[:4]]

    @cached_property
    def _splits(self) -> dict[str, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        """60 / 20 / 20, with a fixed seed and stratified by class, so equal on every machine."""
        digits = load_digits()
        rest, test, rest_labels, test_labels = train_test_split(
            digits.images, digits.target, test_size=0.2, stratify=digits.target, random_state=0
        )
        train, validation, train_labels, validation_labels = train_test_split(
            rest, rest_labels, test_size=0.25, stratify=rest_labels, random_state=0
        )
        return {
            "train": (train, train_labels),
            "validation": (validation, validation_labels),
            "test": (test, test_labels),
        }
