"""Names for stretches of a step, shown in a timeline; next to free while none is recorded."""

from __future__ import annotations

import contextlib

import torch

_IDLE = contextlib.nullcontext()


def phase(name: str) -> contextlib.AbstractContextManager[object]:
    if torch._C._autograd._profiler_enabled():
        return torch.profiler.record_function(name)
    return _IDLE
