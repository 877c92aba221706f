"""Strategies of distributed training, and the choice between them by the train section of the settings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipeline.contract.data import Samples
from pipeline.contract.errors import ConfigError
from pipeline.contract.settings.stages import Train
from train.parallel.base import Objective, Strategy
from train.parallel.compression import CompressedDDPStrategy
from train.parallel.ddp import DDPStrategy
from train.parallel.deterministic import DeterministicStrategy
from train.parallel.fsdp import FSDPStrategy
from train.parallel.horovod import HorovodStrategy
from train.parallel.local_sgd import LocalSGDStrategy
from train.parallel.parameter_server import ParameterServerStrategy
from train.parallel.pipeline_parallel import PipelineStrategy
from train.parallel.pipeline_split import units
from train.pretrained.materialize import Materializer
from train.process_group import ProcessGroup


def make_strategy(
    model: nn.Module,
    objective: Objective,
    group: ProcessGroup,
    config: Train,
    samples: Samples | None = None,
    materializer: Materializer | None = None,
) -> Strategy:
    """Return the strategy that the settings ask for.

    `samples` are for strategies that try a pass of the model before they split it. `materializer` reads the weights of
    a model that has none yet. A process that needs all weights reads all of them: a broadcast would save reading, but
    needs memory for a second copy, and on one machine the files are read from disk only once anyway.
    """
    if group.size > 1 and (config.strategy == "fsdp" or config.tensor_parallel > 1 or config.expert_parallel > 1):
        return FSDPStrategy(model, objective, group, config, samples, materializer)
    if group.size > 1 and config.pipeline_parallel > 1:
        return PipelineStrategy(model, objective, group, config, samples, materializer)
    if materializer:
        materializer.materialize(model, group.device)
    if config.elastic_shards > 0:
        return DeterministicStrategy(model, objective, group, config)
    if group.size == 1:
        return Strategy(model, objective, group, config)
    if config.strategy == "horovod":
        return HorovodStrategy(model, objective, group, config)
    if config.strategy == "parameter_server":
        return ParameterServerStrategy(model, objective, group, config)
    if config.strategy in ("local_sgd", "diloco"):
        return LocalSGDStrategy(model, objective, group, config)
    if config.compress_kind != "none":
        return CompressedDDPStrategy(model, objective, group, config)
    return DDPStrategy(model, objective, group, config)


def recompute_blocks(model: nn.Module) -> None:
    """Make each repeated block drop its activations in the forward pass and compute them again in the backward pass.

    Blocks with running statistics are left out: a second pass would update them twice.
    """
    blocks = [unit.module for unit in units(model) if unit.repeated and not _has_running_statistics(unit.module)]
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


def _checkpointed(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _has_running_statistics(block: nn.Module) -> bool:
    return any(getattr(module, "track_running_stats", False) for module in block.modules())
