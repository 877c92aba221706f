"""Data parallelism with DistributedDataParallel: every process has the whole model, gradients are averaged."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from train.parallel.base import MicroBatch, Strategy

# A DistributedDataParallel that outlives its process group deadlocks when it is freed: gloo's destructor joins
# threads that may wait for the interpreter lock it holds. So wrapped models are never freed, and the process
# ends by os._exit (in __main__).
_never_freed: list[nn.Module] = []

# torch 2.13 renamed the argument that broadcasts buffers at every forward pass, and warns about the old name.
_ARGUMENTS = inspect.signature(DistributedDataParallel).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _ARGUMENTS else "broadcast_buffers"

_ONE_BUCKET_MB = 1 << 20  # on a CPU the exchange cannot overlap with computation, which needs the same cores


class DDPStrategy(Strategy):
    BUCKET_CAP_MB: float = 0  # 0: one bucket on CPU, torch's default on GPUs

    def wrap_model(self) -> nn.Module:
        on_gpu = self.group.device.type == "cuda"
        buffers: dict[str, Any] = {_SYNC_BUFFERS: not has_only_running_statistics(self.model)}
        self.ddp = DistributedDataParallel(
            self.model,
            bucket_cap_mb=self.BUCKET_CAP_MB or (None if on_gpu else _ONE_BUCKET_MB),
            gradient_as_bucket_view=True,
            **buffers,
        )
        _never_freed.append(self.ddp)
        self._exchanged_bytes = sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)
        return torch.compile(self.ddp) if self.config.compile else self.ddp  # type: ignore[return-value]

    def warm_up(self, micro_batches: Callable[[], Iterable[MicroBatch]]) -> None:
        """Make two passes and discard their gradients.

        DistributedDataParallel reorders its buckets after the first exchange. Done here, always on the same batch,
        a resumed run adds up gradients in the same order as an uninterrupted one: with three processes or more the
        order changes the bits.
        """
        first_batch = replace(next(iter(micro_batches())), last=True)
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        for _ in range(2):  # buckets are reordered at the second forward pass
            self.backward([first_batch])
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(buffers[name])
        self.model.zero_grad(set_to_none=True)
        self.traffic.sent_bytes = 0

    def gradient_sync(self, last: bool) -> contextlib.AbstractContextManager[object]:
        if not last:
            return self.ddp.no_sync()
        self.traffic.sent_bytes += self._exchanged_bytes
        return contextlib.nullcontext()


def has_only_running_statistics(model: nn.Module) -> bool:
    """Return whether all buffers are running statistics of norms, which no training pass reads.

    Then each process may keep its own; those of the first one are broadcast before weights are validated or saved.
    """
    norms = [module for module in model.modules() if isinstance(module, _NormBase)]
    statistics = {id(buffer) for norm in norms for buffer in norm.buffers(recurse=False)}
    return all(id(buffer) in statistics for buffer in model.buffers())


class BufferSnapshot:
    """Copies of a model's buffers, to put them back.

    All are copied each time: running statistics are written without changing the tensor's version.
    """

    def __init__(self, model: nn.Module) -> None:
        self._buffers = list(model.buffers())
        self._copies = [buffer.clone() for buffer in self._buffers]

    def take(self) -> None:
        for copy, buffer in zip(self._copies, self._buffers, strict=True):
            copy.copy_(buffer)

    @torch.no_grad()
    def restore(self) -> None:
        for copy, buffer in zip(self._copies, self._buffers, strict=True):
            buffer.copy_(copy)
