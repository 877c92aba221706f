"""Data parallel with Horovod: its optimizer averages the gradients, the rest goes over the group as ever."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipeline.contract.errors import ConfigError, LostContact
from train.parallel.base import Part, Strategy

if TYPE_CHECKING:
    from train.checkpoint.load import Saved


_NOT_YET = 1 << 30  # passes Horovod counts before it sends a gradient: more than a step has


class Horovod(Strategy):
    def adopt(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Around the trainer's optimizer; from here on gradients meet as they are computed, weights are the first's."""
        self._horovod = load_horovod()
        self._horovod.init()
        if self._horovod.size() != self.group.size:
            raise ConfigError(
                f"train.backend=horovod: Horovod sees {self._horovod.size()} of {self.group.size} processes; "
                "start them with horovodrun, as `pipe run` does"
            )
        packed = self.config.compress == "fp16"
        trained = [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        kinds = self._horovod.Compression
        wrapped: Any = self._horovod.DistributedOptimizer(
            optimizer, named_parameters=trained, compression=kinds.fp16 if packed else kinds.none
        )
        self._exchanged_bytes = sum(p.numel() * (2 if packed else p.element_size()) for _, p in trained)
        # Never left: gradients are awaited once, at the end of backward(), before anybody scales or clips them.
        self._by_hand = contextlib.ExitStack()
        self._by_hand.enter_context(wrapped.skip_synchronize())
        self._optimizer = wrapped
        self._horovod.broadcast_parameters(self.model.state_dict(), root_rank=0)
        adopted: torch.optim.Optimizer = wrapped
        return adopted

    def backward(self, parts: Iterable[Part]) -> Tensor:
        total = super().backward(parts)
        with self.stopwatch.waiting(), self._told_plainly():
            self._optimizer.synchronize()
        self.traffic.sent_bytes += self._exchanged_bytes
        return total

    def exchange(self, last: bool) -> contextlib.AbstractContextManager[object]:
        """Horovod counts passes; what it waits for is ours to say, since slices are cut into more or fewer parts."""
        self._optimizer.set_backward_passes_per_step(1 if last else _NOT_YET)
        return self._told_plainly()

    def restore(self, optimizer: torch.optim.Optimizer, saved: Saved) -> None:
        """Every process has read the checkpoint; that all go on from the first one's is certain after this."""
        super().restore(optimizer, saved)
        self._horovod.broadcast_parameters(self.model.state_dict(), root_rank=0)
        self._horovod.broadcast_optimizer_state(optimizer, root_rank=0)

    @contextlib.contextmanager
    def _told_plainly(self) -> Any:
        try:
            yield
        except RuntimeError as error:
            if type(error).__name__ != "HorovodInternalError":
                raise
            raise LostContact(
                f"rank {self.group.rank.rank} lost contact with another process, which was killed, failed or hangs; "
                "the log tells which"
            ) from error


def load_horovod() -> Any:
    """Without types, and not a dependency: it is built against the torch that is installed."""
    try:
        return importlib.import_module("horovod.torch")
    except ImportError as error:
        raise ConfigError(
            f"train.backend=horovod, but the library does not import ({error}); "
            "docs/training.md says how to build it, or use train.backend=torch"
        ) from error
