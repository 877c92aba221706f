"""What training tells while it runs: `metrics.jsonl`, TensorBoard, and a line per epoch on standard output.

What a line of the journal says of the steps since the line before.

What happened since the last line of the journal, kept without making a GPU wait for it.
"""

from __future__ import annotations

import contextlib
import json
import math
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from torch import Tensor
from torch.utils.tensorboard.writer import SummaryWriter

from pipeline.contract.files import unwritable, write_atomic
from train.data import Feed
from train.optim import Precision
from train.parallel.base import Strategy
from train.process_group import Group

_NO_CURVE = {"total_steps", "batch_size", "expert_loads"}  # the same in every line, or too many


class Journal:
    """Written by the first process alone."""

    def __init__(self, directory: Path, resumed_step: int) -> None:
        path, board = directory / "metrics.jsonl", directory / "tensorboard"
        with _writing(path):
            _forget_after(path, resumed_step)
        with _writing(board):
            self._board = SummaryWriter(str(board), purge_step=resumed_step + 1)
        with _writing(path):
            self._file = path.open("a")

    def record(self, step: int, epoch: int, values: Mapping[str, Any]) -> None:
        """One line: `step` steps are complete. Nested values become grouped TensorBoard scalars."""
        self._file.write(json.dumps({"step": step, "epoch": epoch, **values}) + "\n")
        self._file.flush()
        self._draw(step, {name: value for name, value in values.items() if name not in _NO_CURVE})

    def close(self) -> None:
        self._file.close()
        self._board.close()

    def _draw(self, step: int, values: Mapping[str, Any]) -> None:
        """All curves in one event: TensorBoard's checksums are plain Python and take their time from the next steps."""
        points = []
        for name, value in values.items():
            group = value if isinstance(value, Mapping) else {"": value}
            tags = {f"{name if inner else 'train'}/{inner or name}": number for inner, number in group.items()}
            points += [Summary.Value(tag=tag, simple_value=number) for tag, number in tags.items()]
        writer: Any = self._board.file_writer  # published as None, which it is before and after
        writer.add_summary(Summary(value=points), step)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise unwritable(path, error) from error


def _forget_after(path: Path, step: int) -> None:
    """Drop lines of steps that will be done again, so that each step has one line whatever was killed."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except ValueError:
            break  # the half line a kill left behind
    write_atomic(path, "".join(kept))


_RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # what getrusage counts in


@dataclass(frozen=True)
class Reading:
    """This process's running totals at one moment."""

    waited_seconds: float
    sent_bytes: int
    exposed_seconds: float


@dataclass(frozen=True)
class Measured:
    broken: bool  # a loss of some process was not finite
    values: dict[str, Any]


class Meter:
    def __init__(self, strategy: Strategy, feed: Feed, precision: Precision, group: Group) -> None:
        self._strategy, self._feed, self._precision, self._group = strategy, feed, precision, group
        self._before = self._read()

    def restart(self) -> None:
        """What happened so far belongs to no line."""
        self._before = self._read()

    def measure(self, window: Window) -> Measured:
        """All take part: the loss is of the global batches, shares of time are means over the processes."""
        seconds = max(time.perf_counter() - window.started, 1e-9)
        before, now = self._before, self._read()
        exposed = (now.exposed_seconds - before.exposed_seconds) / seconds
        memory = [0.0] * self._group.size  # a place for each process, so that a sum tells the largest
        memory[self._group.rank.rank] = memory_mb(self._group.device)
        broken = window.broken()[0] is not None
        total = self._group.total([broken, window.loss(), exposed, *memory])
        found = {
            "loss": total[1] / window.samples,
            "grad_norm": float(window.norms[-1]),
            "samples_per_second": window.samples / seconds,
            "step_seconds": seconds / window.steps,
            "data_wait_share": (now.waited_seconds - before.waited_seconds) / seconds,
            "sent_bytes_per_step": (now.sent_bytes - before.sent_bytes) / window.steps,
            "communication_share": total[2] / self._group.size if self._sees_waiting() else None,
            "memory_mb": max(total[3:]),
            "gpu_utilization": gpu_utilization(self._group.device),
            **self._precision.told(),
        }
        return Measured(bool(total[0]), {name: value for name, value in found.items() if _worth_telling(value)})

    def _sees_waiting(self) -> bool:
        """Processes that cut a model between them wait in the midst of its passes too: a timeline tells."""
        apart = self._group.model_size == 1 and not self._strategy.together
        return apart and self._strategy.traffic.exposed_seconds > 0

    def _read(self) -> Reading:
        self._strategy.stopwatch.collect()
        traffic = self._strategy.traffic
        return Reading(self._feed.waited_seconds, traffic.sent_bytes, traffic.exposed_seconds)


def memory_mb(device: torch.device) -> float:
    """The most this process has held at once: on the GPU where it has one, else altogether."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT / 2**20


def gpu_utilization(device: torch.device) -> float | None:
    """Share of the last second in which the GPU computed, or nothing where its driver's library is not installed."""
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.utilization(device) / 100
    except Exception:  # NVML refuses on parts of a GPU and without rights, by errors of its own: no reason to stop
        return None


def _worth_telling(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


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
