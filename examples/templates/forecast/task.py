"""Forecast the next 14 days of a series with quantiles: the sales of shops. Replace data/ and model()."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from codec import HISTORY, HORIZONS, Codec
from torch import Tensor, nn
from torch.nn import functional

from pipeline import read_table

SHOPS = ("center", "harbor", "hills", "market", "north", "station")  # replace: the names of your series
SPLITS = {"train": (0, 620, 3), "validation": (620, 720, 4), "test": (720, 900, 2)}  # replace: days, and their step


class Net(nn.Module):
    """Corrects the mean of each weekday by what is known of the days to forecast. Replace: your network."""

    def __init__(self) -> None:
        super().__init__()
        self.past = nn.Sequential(nn.Linear(HISTORY, 64), nn.ReLU(), nn.Linear(64, 16))
        self.day = nn.Sequential(nn.Linear(16 + 8 + 1, 64), nn.ReLU(), nn.Linear(64, 3))

    def forward(self, history: Tensor, days: Tensor) -> Tensor:
        mean = history.mean(dim=1, keepdim=True).clamp(min=1e-3)
        scaled = history / mean
        usual = scaled.reshape(-1, HISTORY // 7, 7).mean(dim=1).repeat(1, HORIZONS // 7)[:, :, None]
        past = self.past(scaled)[:, None].expand(-1, HORIZONS, -1)
        parts = self.day(torch.cat([past, days, usual], dim=2))
        middle = usual + parts[:, :, 1:2]
        below, above = functional.softplus(parts[:, :, :1] - 2), functional.softplus(parts[:, :, 2:] - 2)
        return torch.cat([middle - below, middle, middle + above], dim=2) * mean[:, :, None]


class Task:
    inputs = ("history", "days")  # columns of data() that the model takes, in order
    outputs = ("sales",)  # names for what it returns
    quantiles = (0.1, 0.5, 0.9)
    directions = {"relative_error": "lower"}

    def model(self) -> nn.Module:
        return Net()

    def data(self, split: str) -> dict[str, np.ndarray[Any, Any]]:
        """A sample is a shop on a day: the sales before it, what is known of the days from it on, and their sales."""
        windows, columns = _windows(split)
        return {**Codec().decode(windows), **columns, "index": np.arange(len(windows))}

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        error = (batch["future"][:, :, None] - outputs) / batch["history"].mean(dim=1)[:, None, None]
        levels = torch.tensor(self.quantiles, device=error.device)
        return torch.maximum(levels * error, (levels - 1) * error).mean()

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        error = (outputs[:, :, 1] - batch["future"]).abs().mean(dim=1)
        return {"relative_error": error / batch["future"].mean(dim=1)}

    # With these, the report has mae, rmse, r2, pinball and coverage_error, over all days and for each of them.
    def predicted(self, outputs: Tensor) -> Tensor:
        return outputs[:, :, 1]

    def predicted_quantiles(self, outputs: Tensor) -> Tensor:
        return outputs

    def actual(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["future"]

    # Optional: the model that yours must beat, here the same day of the week before, with the errors of training.
    def baseline(self) -> Any:
        train = self.data("train")
        errors = train["future"] - np.tile(train["history"][:, -7:], (1, HORIZONS // 7))
        spread = torch.from_numpy(np.quantile(errors, self.quantiles, axis=0).T).float()
        return lambda batch: batch["history"][:, -7:].repeat(1, HORIZONS // 7)[:, :, None] + spread

    def slices(self, batch: dict[str, Tensor]) -> dict[str, list[str]]:
        return {"shop": [SHOPS[index] for index in batch["shop"].tolist()]}

    def show(self, batch: dict[str, Tensor], outputs: Tensor) -> list[dict[str, Any]]:
        return [{"history": history} for history in batch["history"]]

    # Optional: test samples as a client would send them, and the answer in a prediction. With these two, the gate
    # compares the codec with the test data.
    def instances(self, batch: dict[str, Tensor]) -> list[Any]:
        windows, _ = _windows("test")
        return [windows[index] for index in batch["index"].tolist()]

    def answer(self, prediction: Any) -> Any:
        return prediction["forecast"]

    # Optional: instances as a client would send them; they become golden requests.
    def example(self) -> list[Any]:
        return _windows("test")[0][:3]


@cache
def _windows(split: str) -> tuple[list[dict[str, Any]], dict[str, np.ndarray[Any, Any]]]:
    """Return samples as a client sends them, and what is not sent: the future, its first day and the shop."""
    table, (first, last, step) = read_table("data/sales.csv"), SPLITS[split]
    windows, others = [], []
    for number, shop in enumerate(SHOPS):
        sales, holiday = (table[name][table["shop"] == shop] for name in ("sales", "holiday"))
        for day in range(max(first, HISTORY), last - HORIZONS + 1, step):
            history, holidays = sales[day - HISTORY : day].tolist(), 1 + np.flatnonzero(holiday[day : day + HORIZONS])
            windows.append({"history": history, "weekday": day % 7, "holidays": holidays.tolist()})
            others.append((sales[day : day + HORIZONS].astype(np.float32), day, number))
    return windows, dict(zip(("future", "day", "shop"), map(np.array, zip(*others, strict=True)), strict=True))
