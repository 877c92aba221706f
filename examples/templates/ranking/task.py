"""Rank the items of a query: hotels. Replace data/ and model()."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from codec import FEATURES, Codec
from sklearn.linear_model import LinearRegression
from torch import Tensor, nn
from torch.nn import functional

from pipeline import read_table


class Net(nn.Module):
    """Scores an item by its features alone. Replace: your network."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.BatchNorm1d(len(FEATURES)), nn.Linear(len(FEATURES), 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(),
            nn.Linear(64, 1),
        )  # fmt: skip

    def forward(self, features: Tensor) -> Tensor:
        scores: Tensor = self.layers(features)
        return scores[:, 0]


class Task:
    inputs = ("features",)  # columns of data() that the model takes, in order
    outputs = ("score",)  # names for what it returns
    directions = {"error": "lower"}

    def model(self) -> nn.Module:
        return Net()

    def data(self, split: str) -> dict[str, np.ndarray[Any, Any]]:
        """A sample is an item: its features, its relevance from 0 to 4, and the number of its query."""
        table = read_table(f"data/{split}.csv")
        rows = zip(*(table[name].tolist() for name in FEATURES), strict=True)
        items = [dict(zip(FEATURES, row, strict=True)) for row in rows]
        return {**Codec().decode(items), "relevance": table["relevance"], "query": table["query"]}

    def sample_groups(self, data: dict[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
        """Keep the items of a query in one batch, because the loss compares them."""
        return data["query"]

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """The score estimates the relevance, and an item of higher relevance needs a higher score (pairwise loss)."""
        query, relevance = batch["query"], batch["relevance"]
        better = ((query[:, None] == query) & (relevance[:, None] > relevance)).float()
        pairs = functional.softplus(outputs - outputs[:, None]) * better
        ordering = (pairs.sum(dim=1) / better.sum(dim=1).clamp(min=1)).mean()
        return ordering + functional.huber_loss(outputs, relevance.float())

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """One value per item; with the three methods below, there are also ndcg, mrr and auc per query."""
        return {"error": (outputs - batch["relevance"]).abs()}

    def predicted(self, outputs: Tensor) -> Tensor:
        return outputs

    def actual(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["relevance"]

    def queries(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["query"]

    # Optional: the model that yours must beat.
    def baseline(self) -> Any:
        train = self.data("train")
        linear = LinearRegression().fit(train["features"], train["relevance"])
        return lambda batch: torch.from_numpy(linear.predict(batch["features"].numpy())).float()

    # Optional: test samples as a client would send them, and the answer in a prediction. With these two, the gate
    # compares the codec with the test data.
    def instances(self, batch: dict[str, Tensor]) -> list[Any]:
        return [dict(zip(FEATURES, row, strict=True)) for row in batch["features"].tolist()]

    def answer(self, prediction: Any) -> Any:
        return prediction["score"]

    # Optional: instances as a client would send them; they become golden requests.
    def example(self) -> list[Any]:
        return [
            {"text_match": 0.9, "price": 80.0, "rating": 4.5, "distance": 0.4},
            {"text_match": 0.2, "price": 45.0, "rating": 3.0, "distance": 6.0},
        ]
