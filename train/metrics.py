"""Training metrics: totals of the steps since the last log line, `metrics.jsonl` and TensorBoard."""

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

from pipeline.contract.results import curve_values
from pipeline.system.files import unwritable, write_atomic
from train.data import BatchLoader
from train.device.flops import ModelFlops
from train.ledger import row_number
from train.optim import Precision
from train.parallel.base import Strategy
from train.process_group import ProcessGroup


class MetricsLog:
    """`metrics.jsonl` and TensorBoard, unless it is switched off; only the first process writes them."""

    def __init__(self, directory: Path, resumed_step: int, tensorboard: bool = True) -> None:
        path, board = directory / "metrics.jsonl", directory / "tensorboard"
        with _report_unwritable(path):
            _drop_lines_after(path, resumed_step)
        self._board: SummaryWriter | None = None
        with _report_unwritable(board):
            if tensorboard:
                self._board = SummaryWriter(str(board), purge_step=resumed_step + 1)
        with _report_unwritable(path):
            self._file = path.open("a")

    def record(self, step: int, epoch: int, values: Mapping[str, Any]) -> None:
        """Write one line after `step` steps. Nested values become grouped TensorBoard scalars."""
        self._file.write(json.dumps({"step": step, "epoch": epoch, **values}) + "\n")
        self._file.flush()
        if self._board is not None:
            self._plot(self._board, step, values)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()

    def _plot(self, board: SummaryWriter, step: int, values: Mapping[str, Any]) -> None:
        """Write all curves as one event: TensorBoard's checksums are plain Python and slow."""
        points = [Summary.Value(tag=tag, simple_value=number) for tag, number in curve_values(values).items()]
        writer: Any = board.file_writer  # None in its type stub
        writer.add_summary(Summary(value=points), step)


@contextlib.contextmanager
def _report_unwritable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise unwritable(path, error) from error


def _drop_lines_after(path: Path, step: int) -> None:
    """Drop the lines of steps that will be repeated, so that each step has one line, and those that are damaged."""
    # A killed process leaves half a line at the end, which is no damage.
    *rows, half = path.read_text(errors="replace").split("\n") if path.exists() else [""]
    steps = [row_number(row, "step") for row in rows]
    if 0 in steps or (step and not path.exists()) or (half and not rows):
        print(f"warning: {path.name} is damaged; the curves lack what cannot be read", file=sys.stderr)
    kept_rows = [f"{row}\n" for row, number in zip(rows, steps, strict=True) if 0 < number <= step]
    if path.exists():
        write_atomic(path, "".join(kept_rows))


_RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # unit of getrusage


@dataclass(frozen=True)
class Measurement:
    is_nonfinite: bool  # a loss of some process was not finite
    values: dict[str, Any]


class StepMeter:
    """Measures the values of a log line: loss, speed, waiting, memory."""

    def __init__(
        self,
        strategy: Strategy,
        loader: BatchLoader,
        precision: Precision,
        group: ProcessGroup,
        flops: ModelFlops | None = None,
    ) -> None:
        self._strategy, self._loader, self._precision, self._group = strategy, loader, precision, group
        self._flops = flops
        self._before = self._read()

    def restart(self) -> None:
        """Start a new window here."""
        self._before = self._read()

    def measure(self, window: StepWindow) -> Measurement:
        """Return the values since the last restart; all take part. Shares of time are means over the processes."""
        seconds = max(time.perf_counter() - window.started, 1e-9)
        waited, sent, exposed = (now - before for now, before in zip(self._read(), self._before, strict=True))
        memory = [0.0] * self._group.size  # one entry per process, so that a sum collects all
        memory[self._group.rank.rank] = peak_memory_bytes(self._group.device) / 2**20
        is_nonfinite = window.first_nonfinite()[0] is not None
        total = self._group.total([is_nonfinite, window.loss(), exposed / seconds, *memory])
        values = {
            "loss": total[1] / window.samples,
            "grad_norm": float(window.norms[-1]),
            "samples_per_second": window.samples / seconds,
            "mfu": self._flops.utilization(window.samples / seconds) if self._flops else None,
            "step_seconds": seconds / window.steps,
            "data_wait_share": waited / seconds,
            "sent_bytes_per_step": sent / window.steps,
            "communication_share": total[2] / self._group.size if self._measures_waiting() else None,
            "memory_mb": max(total[3:]),
            "gpu_utilization": gpu_utilization(self._group.device),
            **self._precision.metrics(),
        }
        finite = {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
        return Measurement(bool(total[0]), finite)

    def _measures_waiting(self) -> bool:
        """Return False for tensor and pipeline parallelism: there, processes also wait within a pass."""
        is_alone = self._group.model_size == 1 and not self._strategy.collective_forward
        return is_alone and self._strategy.traffic.exposed_seconds > 0

    def _read(self) -> tuple[float, int, float]:
        """Return running totals of this process: seconds it waited for data, bytes it sent, exposed seconds."""
        self._strategy.stopwatch.collect()
        traffic = self._strategy.traffic
        return self._loader.waited_seconds, traffic.sent_bytes, traffic.exposed_seconds


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process: what torch allocated on its GPU, or on a CPU its resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT


def gpu_utilization(device: torch.device) -> float | None:
    """Return the share of the last second in which the GPU was busy; None if NVML does not know."""
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.utilization(device) / 100
    except Exception:  # NVML fails on MIG slices and without rights, with errors of its own
        return None


@dataclass
class StepWindow:
    """Losses and gradient norms since the last log line, kept as tensors so that no GPU is waited for."""

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

    def first_nonfinite(self, first: int = 0) -> tuple[int | None, int | None]:
        """Return the first steps, from `first` on, whose loss and whose gradient were not finite here."""
        return _first_nonfinite(self.losses, first), _first_nonfinite(self.norms, first)

    def overflows(self, first: int = 0) -> int:
        """Count the steps from `first` on whose gradient was not finite."""
        return sum(not math.isfinite(norm) for norm in _values(self.norms[first:]))

    def loss(self) -> float:
        return float(torch.stack(self.losses).double().sum())


def _first_nonfinite(tensors: list[Tensor], first: int) -> int | None:
    values = _values(tensors[first:])
    return next((first + i for i, value in enumerate(values) if not math.isfinite(value)), None)


def _values(tensors: list[Tensor]) -> list[float]:
    """Read all values at once on a GPU: every read waits for it."""
    if len(tensors) > 1 and tensors[0].device.type == "cuda":
        values: list[float] = torch.stack(tensors).tolist()
        return values
    return [tensor.item() for tensor in tensors]
