"""A tagger of characters, whose bidirectional GRU also reads the padding behind a text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .conftest import COUNT, Small

LENGTH, LONGEST, LETTERS, KINDS = 9, 20, 12, 3


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(LETTERS, 6, padding_idx=0)
        self.gru: nn.Module = nn.GRU(6, 5, batch_first=True, bidirectional=True)
        self.head = nn.Linear(10, KINDS)

    def forward(self, letters: Tensor, real: Tensor) -> Tensor:
        hidden, _ = self.gru(self.embed(letters) * real[:, :, None])
        found: Tensor = self.head(hidden)
        return found


def texts(length: int = LENGTH, count: int = COUNT) -> dict[str, np.ndarray[Any, Any]]:
    """Texts of 3 and more letters, padded with 0 behind; the mask has an unusual name."""
    lengths = 3 + np.arange(count) % (length - 2)
    real = np.arange(length) < lengths[:, None]
    letters = np.random.default_rng(0).integers(1, LETTERS, size=(count, length))
    return {"letters": letters * real, "real": real.astype(np.int64)}


@dataclass
class Tags(Small):
    net: nn.Module = field(default_factory=Tagger)
    columns: dict[str, np.ndarray[Any, Any]] = field(default_factory=texts)
    inputs: tuple[str, ...] = ("letters", "real")
    outputs: tuple[str, ...] = ("tags",)
    axes: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(("letters", "real"), ("batch", "time")))
    longest: dict[str, int] = field(default_factory=lambda: {"time": LONGEST})
