"""Your task: a model, its data, and what "good" means. Everything here is yours to replace."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from codec import MEAN, SCALE, Codec
from sklearn.datasets import load_wine
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional


class Task:
    inputs = ("features",)  # columns of data() that model() takes, in order
    outputs = ("scores",)  # names for what it returns
    classes = ("barolo", "grignolino", "barbera")

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, len(self.classes)))

    def data(self, split: str) -> dict[str, np.ndarray[Any, Any]]:
        """Columns of one split: "train", "validation" or "test"; the same samples every time it is called."""
        wine = load_wine()
        rows = np.arange(len(wine.target))
        train, rest = train_test_split(rows, test_size=0.5, stratify=wine.target, random_state=0)
        validation, test = train_test_split(rest, test_size=0.6, stratify=wine.target[rest], random_state=0)
        chosen = {"train": train, "validation": validation, "test": test}[split]
        return {**Codec().decode(wine.data[chosen]), "label": wine.target[chosen]}

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """Mean over the batch."""
        return functional.cross_entropy(outputs, batch["label"])

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """One value per sample, higher is better."""
        return {"accuracy": (self.predicted(outputs) == batch["label"]).float()}

    # Optional: with these two and `classes`, you get per-class metrics and a confusion matrix.
    def predicted(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(dim=1)

    def actual(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["label"]

    # Optional: the model must not be worse than this.
    def baseline(self) -> Any:
        commonest = int(np.bincount(self.data("train")["label"]).argmax())
        answer = functional.one_hot(torch.tensor(commonest), len(self.classes)).float()
        return lambda batch: answer.repeat(len(batch["features"]), 1)

    # Optional: test samples as a client would send them, and the answer in a prediction. With these two, the gate
    # compares the codec with the test data.
    def instances(self, batch: dict[str, Tensor]) -> list[Any]:
        return [row.tolist() for row in batch["features"].numpy() * SCALE + MEAN]

    def answer(self, prediction: Any) -> Any:
        return prediction["class"]

    # Optional: instances as a client would send them; they become golden requests.
    def example(self) -> list[Any]:
        return [row.tolist() for row in load_wine().data[[0, 60, 150]]]

    # Optional: what the report shows of a sample; here its original values and the scores by class.
    def show(self, batch: dict[str, Tensor], outputs: Tensor) -> list[dict[str, Any]]:
        original = (batch["features"].numpy() * SCALE + MEAN).round(2).tolist()
        names = load_wine().feature_names
        return [
            {"wine": dict(zip(names, wine, strict=True)), "scores": dict(zip(self.classes, scores, strict=True))}
            for wine, scores in zip(original, outputs.tolist(), strict=True)
        ]
