"""What happened since the last line of the journal, kept without making a GPU wait for it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Window:
    """Sums of one process; tensors are looked at together, when somebody needs their values."""

    started: float = field(default_factory=time.perf_counter)
    losses: list[Tensor] = field(default_factory=list)  # sum over this process's slice, one a step
    norms: list[Tensor] = field(default_factory=list)
    samples: int = 0  # of whole global batches

    @property
    def steps(self) -> int:
        return len(self.losses)

    def add(self, loss: Tensor, norm: Tensor, samples: int) -> None:
        self.losses.append(loss)
        self.norms.append(norm)
        self.samples += samples

    def broken(self, first: int = 0) -> tuple[int | None, int | None]:
        """The first step from `first` on whose loss, and whose gradient, was not finite here."""
        return self._first_broken(self.losses, first), self._first_broken(self.norms, first)

    def _first_broken(self, tensors: list[Tensor], first: int) -> int | None:
        values = _values(tensors[first:])
        return next((first + i for i, value in enumerate(values) if not math.isfinite(value)), None)

    def overflows(self, first: int = 0) -> int:
        """Steps from `first` on whose gradient was not finite."""
        return sum(not math.isfinite(norm) for norm in _values(self.norms[first:]))

    def loss(self) -> float:
        return float(torch.stack(self.losses).double().sum())


def _values(tensors: list[Tensor]) -> list[float]:
    """Of a GPU all at once: it is waited for each time."""
    if len(tensors) > 1 and tensors[0].device.type == "cuda":
        values: list[float] = torch.stack(tensors).tolist()
        return values
    return [tensor.item() for tensor in tensors]
