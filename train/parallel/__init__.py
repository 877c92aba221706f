"""Strategies of distributed training, and the choice between them by the train section of the settings."""

from __future__ import annotations

from torch import nn

from pipeline.contract.data import Samples
from pipeline.contract.settings.stages import Train
from train.parallel.base import Objective, Strategy
from train.parallel.compression import CompressedDDPStrategy
from train.parallel.ddp import DDPStrategy, HorovodStrategy
from train.parallel.deterministic import DeterministicStrategy
from train.parallel.fsdp import FSDPStrategy
from train.parallel.local_sgd import LocalSGDStrategy
from train.parallel.parameter_server import ParameterServerStrategy
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
    if group.size > 1 and config.pipeline_parallel > 1:
        from train.parallel.pipeline_parallel import PipelineStrategy  # slow to import: torch's compiler comes with it

        return PipelineStrategy(model, objective, group, config, samples, materializer)
    if group.size > 1 and (config.strategy == "fsdp" or config.tensor_parallel > 1 or config.expert_parallel > 1):
        return FSDPStrategy(model, objective, group, config, samples, materializer)
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
