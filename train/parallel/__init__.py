"""How one model lives on several processes, chosen by the words of the train section."""

from __future__ import annotations

from torch import nn

from pipeline.contract.data import Samples
from pipeline.contract.settings.stages import Train
from train.parallel.base import Objective, Strategy
from train.parallel.compression import CompressedDataParallel
from train.parallel.ddp import DataParallel
from train.parallel.deterministic import DeterministicDataParallel
from train.parallel.fsdp import FullyShardedDataParallel
from train.parallel.horovod import Horovod
from train.parallel.local_sgd import LocalSGD
from train.parallel.parameter_server import ParameterServer
from train.parallel.pipeline_parallel import PipelineParallel
from train.pretrained.fill import Filling
from train.process_group import Group


def make_strategy(
    model: nn.Module,
    objective: Objective,
    group: Group,
    config: Train,
    samples: Samples | None = None,
    filling: Filling | None = None,
) -> Strategy:
    """`samples` are for those that must try a pass of the model before they can cut it.

    `filling` is for a model that has no weights yet. Who holds all of them reads all: a broadcast would spare the
    files, which on one machine are read once anyway, and cost a second copy of what is sent.
    """
    if group.size > 1 and (config.parallel == "fsdp" or config.tensor > 1 or config.expert > 1):
        return FullyShardedDataParallel(model, objective, group, config, samples, filling)
    if group.size > 1 and config.pipeline > 1:
        return PipelineParallel(model, objective, group, config, samples, filling)
    if filling:
        filling.fill(model, group.device)
    if config.elastic == "exact":
        return DeterministicDataParallel(model, objective, group, config)
    if group.size == 1:
        return Strategy(model, objective, group, config)
    if config.backend == "horovod":
        return Horovod(model, objective, group, config)
    if config.sync == "parameter_server":
        return ParameterServer(model, objective, group, config)
    if config.sync in ("local_sgd", "diloco"):
        return LocalSGD(model, objective, group, config)
    if config.compress != "none":
        return CompressedDataParallel(model, objective, group, config)
    return DataParallel(model, objective, group, config)
