"""The parameter server: hands out the steps of an epoch, and applies each gradient as it comes unless it is too old."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from train.strategy.outer import flat


@dataclass(frozen=True)
class Work:
    """What a worker computes next."""

    step: int
    version: int  # updates that made these weights
    weights: Tensor


@dataclass(frozen=True)
class Result:
    """What it found."""

    step: int
    version: int
    samples: int
    loss: float  # mean over the samples
    norm: float
    gradient: Tensor


@dataclass
class Tally:
    """What happened since the last line of the journal."""

    loss: float = 0.0  # sum over samples
    samples: int = 0
    norm: float = 0.0  # of the last gradient
    staleness: list[int] = field(default_factory=list)  # updates between the weights of a gradient and its own
    redone: int = 0  # gradients that were too old
    steps_by_rank: Counter[int] = field(default_factory=Counter)


class Server:
    """Used by a thread for each worker, one at a time.

    Every step of an epoch is handed out once, and once more to the same worker, with fresh weights, whenever its
    gradient comes back more than `staleness` updates old. So every step is applied exactly once.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        optimizer: torch.optim.Optimizer,
        rate: Callable[[int], float],
        staleness: int,
        updated: Callable[[int, Tally], bool],
    ) -> None:
        """`updated` is told of every update; when it returns true the tally starts anew."""
        self._parameters, self._optimizer, self._rate = parameters, optimizer, rate
        self._staleness, self._updated = staleness, updated
        self._lock = threading.Lock()
        self._steps: Iterator[int] = iter(())
        self._failure: Exception | None = None
        self._tally = Tally()
        self.updates = 0

    def open(self, steps: range) -> None:
        """The steps of an epoch; all before them are applied."""
        self._steps, self.updates = iter(steps), steps.start

    def trade(self, rank: int, result: Result | None) -> Work | None:
        """A result for the next step; nothing when all steps of the epoch are handed out."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if result is not None and self.updates - result.version > self._staleness:
                self._tally.redone += 1
                return Work(result.step, self.updates, flat(self._parameters).cpu())
            if result is not None:
                self._apply(rank, result)
            step = next(self._steps, None)
            return None if step is None else Work(step, self.updates, flat(self._parameters).cpu())

    def fail(self, error: Exception) -> None:
        """No further trade succeeds; the first error is the one that is told."""
        with self._lock:
            self._failure = self._failure or error

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _apply(self, rank: int, result: Result) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate(self.updates)
        sizes = [parameter.numel() for parameter in self._parameters]
        for parameter, part in zip(self._parameters, torch.split(result.gradient, sizes), strict=True):
            parameter.grad = part.view_as(parameter).to(parameter)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        tally = self._tally
        tally.loss += result.loss * result.samples
        tally.samples += result.samples
        tally.norm = result.norm
        tally.staleness.append(self.updates - result.version)
        tally.steps_by_rank[rank] += 1
        self.updates += 1
        if self._updated(self.updates, tally):
            self._tally = Tally()
