"""Data parallel: every process holds the model, DistributedDataParallel averages the gradients.

Which buffers of a model the processes must keep equal, and how they are put back to where they were.
"""

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

from train.parallel.base import Part, Strategy


def only_statistics(model: nn.Module) -> bool:
    """Whether all buffers are running statistics of norms, which no training pass reads.

    Then each process may keep its own: those of the first one are handed out before weights are judged or saved.
    """
    norms = [module for module in model.modules() if isinstance(module, _NormBase)]
    known = {id(buffer) for norm in norms for buffer in norm.buffers(recurse=False)}
    return all(id(buffer) in known for buffer in model.buffers())


class Rewinding:
    """Buffers of a model as they were at some moment.

    All are copied each time: running statistics are written to without a trace in the tensor's version.
    """

    def __init__(self, model: nn.Module) -> None:
        self._buffers = list(model.buffers())
        self._copies = [buffer.clone() for buffer in self._buffers]

    def note(self) -> None:
        """This is the moment."""
        for copy, buffer in zip(self._copies, self._buffers, strict=True):
            copy.copy_(buffer)

    @torch.no_grad()
    def rewind(self) -> None:
        for copy, buffer in zip(self._copies, self._buffers, strict=True):
            buffer.copy_(copy)


# A DistributedDataParallel that outlives its process group deadlocks when it is freed: gloo's destructor joins
# threads that may wait for the interpreter lock it holds. So wrapped models are never freed, and the process
# ends by os._exit (in __main__).
_wrapped: list[nn.Module] = []

# torch 2.13 has a new name for whether buffers are broadcast at every forward pass, and warns of the old one.
_NAMES = inspect.signature(DistributedDataParallel).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _NAMES else "broadcast_buffers"

_ONE_BUCKET_MB = 1 << 20  # on CPU the exchange cannot hide behind computation that needs the same cores


class DataParallel(Strategy):
    def wrap(self) -> nn.Module:
        config, on_gpu = self.config, self.group.device.type == "cuda"
        buffers: dict[str, Any] = {_SYNC_BUFFERS: not only_statistics(self.model)}
        self.ddp = DistributedDataParallel(
            self.model,
            bucket_cap_mb=config.bucket_mb or (None if on_gpu else _ONE_BUCKET_MB),
            gradient_as_bucket_view=True,
            static_graph=config.static_graph,
            **buffers,
        )
        _wrapped.append(self.ddp)
        self._exchanged_bytes = sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)
        return torch.compile(self.ddp) if config.compile else self.ddp  # type: ignore[return-value]

    def warm_up(self, parts: Callable[[], Iterable[Part]]) -> None:
        """Two passes that count for nothing.

        DistributedDataParallel orders its buckets anew after the first exchange. Done here, always on the same
        batch, a resumed run sums gradients in the order of the uninterrupted one: with three processes or more
        the order changes the bits. A static graph needs an exchange in its very first pass, which in a step of
        several micro-batches has none.
        """
        first = replace(next(iter(parts())), last=True)
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        for _ in range(2):  # the new order is made at the second forward pass
            self.backward([first])
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(buffers[name])
        self.model.zero_grad(set_to_none=True)
        self.traffic.sent_bytes = 0

    def exchange(self, last: bool) -> contextlib.AbstractContextManager[object]:
        """Gradients meet once a step, with the last micro-batch."""
        if not last:
            return self.ddp.no_sync()
        self.traffic.sent_bytes += self._exchanged_bytes
        return contextlib.nullcontext()
