"""Predict a number from a row of a table with missing values: the rent of a flat. Replace data() and model()."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from codec import Codec
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LinearRegression
from sklearn.pipeline import make_pipeline
from torch import Tensor, nn
from torch.nn import functional

Rows = list[dict[str, Any]]


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
        # Replace: read your rows, for example with `pipeline.read_table(f"{split}.csv")`.
        rows = _made_up_flats({"train": 2000, "validation": 500, "test": 1000}[split], split)
        rents = np.array([row.pop("rent") for row in rows], np.float32)
        return {**Codec().decode(rows), "rent": rents}

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

    # Optional: instances as a client would send them; they become golden requests.
    def example(self) -> list[Any]:
        return [
            {"area": 54, "rooms": 2, "floor": 3, "year": 1995, "district": "north"},
            {"area": 120, "rooms": 4, "floor": None, "year": 1910, "district": "center"},
            {"area": 33, "rooms": 1, "district": "harbor"},
        ]


def _made_up_flats(count: int, split: str) -> Rows:
    random = np.random.default_rng(list(split.encode()))
    rows: Rows = []
    for _ in range(count):
        area, floor, year = random.uniform(20, 160), int(random.integers(0, 9)), int(random.integers(1880, 2025))
        district = str(random.choice(["center", "north", "harbor", "hills"]))
        price = {"center": 17.0, "north": 10.0, "harbor": 13.0, "hills": 15.0}[district]
        age_factor = 1.25 if year < 1920 else 0.85 if 1950 < year < 1980 else 1.0
        rent = area**0.9 * price * age_factor * (1 + 0.02 * floor) + random.normal(0, 60)
        row = {"area": round(area, 2), "rooms": 1 + int(area / 32), "floor": floor, "year": year, "district": district}
        unknown = {name for name in ("rooms", "floor", "year") if random.random() < 0.1}
        rows.append({name: None if name in unknown else value for name, value in row.items()} | {"rent": rent})
    return rows
