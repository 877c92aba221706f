"""What `compile: true` needs: a compiler, and kernels that take batches of any size where sizes differ."""

from __future__ import annotations

import shutil
from collections.abc import Mapping

import torch
from torch import Tensor

from pipeline.spec.errors import ConfigError
from train.order import Order


def check_compiler(device: torch.device) -> None:
    """Told before anything is trained: torch would find out in the midst of the first step."""
    from torch._inductor import config  # as slow to load as compilation is to start

    names = ["gcc", "clang", "cc"] if device.type == "cuda" else [name for name in config.cpp.cxx if name]
    if not any(shutil.which(name) for name in names):
        raise ConfigError(
            f"train.compile=true: no compiler ({' or '.join(names)}) on {device.type}; "
            "install one (Debian: apt-get install g++), or set train.compile=false"
        )


def sizes_differ(order: Order, cuts: int) -> bool:
    """Whether micro-batches differ in size, every batch being cut into `cuts` of them."""
    return order.samples % (order.steps_per_epoch * cuts) != 0


def take_any_size(batch: Mapping[str, Tensor]) -> None:
    """One graph for all sizes from the first step on.

    Left alone, torch compiles the first size, then a graph for all others; which of the two a step runs depends on
    the sizes before it, so that a resumed run could end with other bits.
    """
    for column in batch.values():
        torch._dynamo.maybe_mark_dynamic(column, 0)
