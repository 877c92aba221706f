"""Predict a number from a row of a table with missing values: the rent of a flat. Replace data/ and model()."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from codec import Codec
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LinearRegression
from sklearn.pipeline import make_pipeline
from torch import Tensor, nn
from torch.nn import functional

from pipeline import read_table


class Net(nn.Module):
    """Fills missing values with the mean of the training data and marks which were missing. Replace: your network."""

    mean: Tensor
    deviation: Tensor
    target: Tensor

    def __init__(self, features: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> None:
        super().__init__()
        # Buffers are saved with the weights, so that the service scales as training did.
        self.register_buffer("mean", torch.tensor(np.nanmean(features, axis=0)))
        self.register_buffer("deviation", torch.tensor(np.nanstd(features, axis=0)).clamp(min=1e-6))
        self.register_buffer("target", torch.tensor([target.mean(), target.std()]))
        width = features.shape[1]
        self.layers = nn.Sequential(
            nn.Linear(2 * width, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
        )  # fmt: skip

    def forward(self, features: Tensor) -> Tensor:
        missing = features.isnan()
        scaled = torch.where(missing, 0.0, (features - self.mean) / self.deviation)
        scores: Tensor = self.layers(torch.cat([scaled, missing.float()], dim=1))[:, 0]
        return scores * self.target[1] + self.target[0]


class Task:
    inputs = ("features",)  # columns of data() that the model takes, in order
    outputs = ("rent",)  # names for what it returns
    directions = {"absolute_error": "lower"}

    def model(self) -> nn.Module:
        train = self.data("train")
        return Net(train["features"], train["rent"])

    def data(self, split: str) -> dict[str, np.ndarray[Any, Any]]:
        rows, rents = _flats(split)
        return {**Codec().decode(rows), "rent": rents, "index": np.arange(len(rows))}

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return functional.huber_loss(outputs / 100, batch["rent"] / 100)  # in hundreds, so that it is about 1

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"absolute_error": (outputs - batch["rent"]).abs()}

    # With these two and without `classes`, the report has mae, rmse, r2 and spearman.
    def predicted(self, outputs: Tensor) -> Tensor:
        return outputs

    def actual(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["rent"]

    # Optional: the model that yours must beat.
    def baseline(self) -> Any:
        train = self.data("train")
        linear = make_pipeline(SimpleImputer(), LinearRegression()).fit(train["features"], train["rent"])
        return lambda batch: torch.from_numpy(linear.predict(batch["features"].numpy())).float()

    # Optional: test samples as a client would send them, and the answer in a prediction. With these two, the gate
    # compares the codec with the test data.
    def instances(self, batch: dict[str, Tensor]) -> list[Any]:
        rows, _ = _flats("test")
        return [rows[index] for index in batch["index"].tolist()]

    def answer(self, prediction: Any) -> Any:
        return prediction["rent"]

    # Optional: instances as a client would send them; they become golden requests.
    def example(self) -> list[Any]:
        return [
            {"area": 54, "rooms": 2, "floor": 3, "year": 1995, "district": "north"},
            {"area": 120, "rooms": 4, "floor": None, "year": 1910, "district": "center"},
            {"area": 33, "rooms": 1, "district": "harbor"},
        ]


@cache
def _flats(split: str) -> tuple[list[dict[str, Any]], np.ndarray[Any, Any]]:
    """Return rows as a client sends them, and the rents."""
    table = read_table(f"data/{split}.csv")
    rents = table.pop("rent").astype(np.float32)
    return [dict(zip(table, row, strict=True)) for row in zip(*map(_plain, table.values()), strict=True)], rents


def _plain(column: np.ndarray[Any, Any]) -> list[Any]:
    """Return the values of a column as a client sends them: None where one is missing."""
    return [None if value != value else value for value in column.tolist()]
