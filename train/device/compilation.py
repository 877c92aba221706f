"""torch.compile: the compiler and its cache, and one graph for batches of all sizes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from pipeline.contract.settings.stages import Train
from pipeline.system.errors import ConfigError
from pipeline.system.torch_private import cpp_compilers, mark_dynamic
from train.batch_order import BatchOrder

_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def check_compiler(config: Train, device: torch.device) -> None:
    """Raise ConfigError without a compiler, before training: torch would fail in the middle of the first step."""
    names = ["gcc", "clang", "cc"] if device.type == "cuda" else cpp_compilers()
    if not any(shutil.which(name) for name in names):
        raise ConfigError(
            f"train.compile={str(config.compile).lower()}: no compiler ({' or '.join(names)}) on {device.type}; "
            "to fix it, install one (Debian: apt-get install g++), or set train.compile=false"
        )


def keep_compile_cache() -> None:
    """Let torch keep what it compiles in the user's cache, for restarts and later runs.

    By default it is in /tmp, and gone with the machine or the pod.
    """
    if _CACHE_VARIABLE not in os.environ:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pipe" / "compile"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            return  # a pod may have no home
        os.environ[_CACHE_VARIABLE] = str(folder)


def compile_whole(module: nn.Module, config: Train) -> nn.Module:
    """Compile a model with the module around it; `compile: blocks` has compiled its parts already."""
    return torch.compile(module) if config.compile is True else module  # type: ignore[return-value]


def batch_sizes_differ(order: BatchOrder, cuts: int) -> bool:
    """Return whether micro-batches differ in size when every batch is cut into `cuts` of them."""
    return not order.has_equal_batches or order.samples % (order.steps_per_epoch * cuts) != 0


def mark_batch_dynamic(batch: Mapping[str, Tensor], any_length: bool = False) -> None:
    """Compile one graph for all batch sizes, and all lengths of padded samples, from the first step on.

    By default, torch compiles the first size, then a graph for all others; which of the two a step runs depends on
    the sizes before it, so that a resumed run could end with other bits.
    """
    for column in batch.values():
        mark_dynamic(column, list(range(column.ndim)) if any_length else 0)
