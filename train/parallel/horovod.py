"""Data parallelism with Horovod: its optimizer averages the gradients; all else uses torch's process group."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipeline.system.errors import ConfigError, LostContact
from train.parallel.base import MicroBatch, Strategy

if TYPE_CHECKING:
    from train.checkpoint.load import SavedCheckpoint


_NEVER = 1 << 30  # backward passes before Horovod sends a gradient: more than a step has


class HorovodStrategy(Strategy):
    def wrap_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return Horovod's optimizer around the trainer's; weights become those of the first process."""
        self._horovod = load_horovod()
        self._horovod.init()
        if self._horovod.size() != self.group.size:
            raise ConfigError(
                f"train.strategy=horovod: Horovod sees {self._horovod.size()} of {self.group.size} processes; "
                "start them with horovodrun, as `pipe run` does"
            )
        is_fp16 = self.config.compress_kind == "fp16"
        trained_parameters = [
            (name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad
        ]
        compression = self._horovod.Compression
        horovod_optimizer: Any = self._horovod.DistributedOptimizer(
            optimizer,
            named_parameters=trained_parameters,
            compression=compression.fp16 if is_fp16 else compression.none,
        )
        self._exchanged_bytes = sum(p.numel() * (2 if is_fp16 else p.element_size()) for _, p in trained_parameters)
        # This context is never closed: backward() waits for the gradients itself, before they are scaled or clipped.
        self._manual_synchronize = contextlib.ExitStack()
        self._manual_synchronize.enter_context(horovod_optimizer.skip_synchronize())
        self._optimizer = horovod_optimizer
        self._horovod.broadcast_parameters(self.model.state_dict(), root_rank=0)
        distributed: torch.optim.Optimizer = horovod_optimizer
        return distributed

    def compute_gradient(self, micro_batches: Iterable[MicroBatch]) -> Tensor:
        total = super().compute_gradient(micro_batches)
        with self.stopwatch.waiting(), self._explain_lost_contact():
            self._optimizer.synchronize()
        self.traffic.sent_bytes += self._exchanged_bytes
        return total

    def gradient_sync(self, last: bool) -> contextlib.AbstractContextManager[object]:
        """Set when Horovod sends: it counts passes, but the number of micro-batches differs between slices."""
        self._optimizer.set_backward_passes_per_step(1 if last else _NEVER)
        return self._explain_lost_contact()

    def restore(self, optimizer: torch.optim.Optimizer, saved: SavedCheckpoint) -> None:
        """Broadcast what the first process has read, so that all certainly continue from the same state."""
        super().restore(optimizer, saved)
        self._horovod.broadcast_parameters(self.model.state_dict(), root_rank=0)
        self._horovod.broadcast_optimizer_state(optimizer, root_rank=0)

    @contextlib.contextmanager
    def _explain_lost_contact(self) -> Any:
        try:
            yield
        except RuntimeError as error:
            if type(error).__name__ != "HorovodInternalError":
                raise
            raise LostContact(
                f"rank {self.group.rank.rank} lost contact with another process, which was killed, failed or hangs; "
                "see the log"
            ) from error


def load_horovod() -> Any:
    """Import Horovod, which is no dependency: it must be built against the installed torch."""
    try:
        return importlib.import_module("horovod.torch")
    except ImportError as error:
        raise ConfigError(
            f"train.strategy=horovod: Horovod cannot be imported ({error}); "
            "to fix it: python -m train.install_horovod, or use train.strategy=ddp"
        ) from error
