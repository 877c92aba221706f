"""Which buffers of a model the processes must keep equal."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _NormBase


def only_statistics(model: nn.Module) -> bool:
    """Whether all buffers are running statistics of norms, which no training pass reads.

    Then each process may keep its own: those of the first one are handed out before weights are judged or saved.
    """
    norms = [module for module in model.modules() if isinstance(module, _NormBase)]
    known = {id(buffer) for norm in norms for buffer in norm.buffers(recurse=False)}
    return all(id(buffer) in known for buffer in model.buffers())
