"""Batches on the training device, and how long they let it wait."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from pipeline.spec.data import Samples
from train.order import Indices


class Feed:
    def __init__(self, samples: Samples, device: torch.device) -> None:
        self._samples, self._device = samples, device
        self.waited_seconds = 0.0

    def fetch(self, indices: Indices) -> dict[str, Tensor]:
        started = time.perf_counter()
        batch = {name: column.to(self._device) for name, column in self._samples.batch(indices).items()}
        self.waited_seconds += time.perf_counter() - started
        return batch
