"""Which buffers of a model the processes must keep equal, and how they are put back to where they were."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase


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
