"""The repeated blocks of a model, such as the layers of a transformer: each is compiled, or computed again.

Blocks are the members of the outermost ModuleLists and Sequentials.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipeline.system.errors import ConfigError
from train.parallel.pipeline_split import units


def compile_blocks(model: nn.Module, any_size: bool) -> None:
    """Compile each repeated block that has layers of its own, for training only; equal blocks are compiled once.

    With `any_size`, a graph takes batches of all sizes from the first step on, so that a resumed run uses the same one.
    """
    blocks = [block for block in _repeated_blocks(model) if any(True for _ in block.children())]
    if not blocks:
        raise ConfigError(
            "train.compile=blocks: the model has no repeated blocks, which are members of a ModuleList or Sequential "
            "with layers of their own; set train.compile=true"
        )
    for block in blocks:
        compiled = torch.compile(block.forward, dynamic=any_size)
        block.forward = partial(_compiled_in_training, block, block.forward, compiled)


def _compiled_in_training(
    block: nn.Module, forward: Callable[..., Any], compiled: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    return (compiled if block.training else forward)(*args, **kwargs)


def recompute_blocks(model: nn.Module) -> None:
    """Make each repeated block drop its activations in the forward pass and compute them again in the backward pass.

    Blocks with running statistics are left out: a second pass would update them twice.
    """
    blocks = [block for block in _repeated_blocks(model) if not _has_running_statistics(block)]
    if not blocks:
        raise ConfigError(
            "train.recompute=blocks: the model has no repeated blocks, which are members of a ModuleList or Sequential "
            "without running statistics; set train.recompute=none"
        )
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # a second pass would append to the cache of transformers
    for block in blocks:
        block.forward = partial(_checkpointed, block, block.forward)


@contextlib.contextmanager
def without_recomputation(model: nn.Module) -> Iterator[None]:
    """Let the blocks of a model keep their activations for a while."""
    forwards = {module: vars(module).get("forward") for module in model.modules()}
    checkpointed = {module: forward for module, forward in forwards.items() if _is_checkpointed(forward)}
    for block, forward in checkpointed.items():
        block.forward = forward.args[1]
    try:
        yield
    finally:
        for block, forward in checkpointed.items():
            block.forward = forward


def _is_checkpointed(forward: Any) -> TypeGuard[partial[Any]]:
    return isinstance(forward, partial) and forward.func is _checkpointed


def _checkpointed(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _has_running_statistics(block: nn.Module) -> bool:
    return any(getattr(module, "track_running_stats", False) for module in block.modules())


def _repeated_blocks(model: nn.Module) -> list[nn.Module]:
    return [unit.module for unit in units(model) if unit.repeated]
