"""How one model lives on several processes, chosen by the words of the train section."""

from __future__ import annotations

from torch import nn

from pipeline.spec.data import Samples
from pipeline.spec.sections import Train
from train.group import Group
from train.objective import Objective
from train.pretrained.filling import Filling
from train.strategy.alone import Alone, Part
from train.strategy.exact import Exact
from train.strategy.horovod import Horovod
from train.strategy.packed import Packed
from train.strategy.replicated import Replicated
from train.strategy.seldom import Seldom
from train.strategy.served import Served
from train.strategy.sharded import Sharded
from train.strategy.staged import Staged
from train.strategy.traffic import Traffic

__all__ = ["Alone", "Part", "Traffic", "make_strategy"]


def make_strategy(
    model: nn.Module,
    objective: Objective,
    group: Group,
    config: Train,
    samples: Samples | None = None,
    filling: Filling | None = None,
) -> Alone:
    """`samples` are for those that must try a pass of the model before they can cut it.

    `filling` is for a model that has no weights yet. Who holds all of them reads all: a broadcast would spare the
    files, which on one machine are read once anyway, and cost a second copy of what is sent.
    """
    if group.size > 1 and (config.parallel == "fsdp" or config.tensor > 1 or config.expert > 1):
        return Sharded(model, objective, group, config, samples, filling)
    if group.size > 1 and config.pipeline > 1:
        return Staged(model, objective, group, config, samples, filling)
    if filling:
        filling.fill(model, group.device)
    if config.elastic == "exact":
        return Exact(model, objective, group, config)
    if group.size == 1:
        return Alone(model, objective, group, config)
    if config.backend == "horovod":
        return Horovod(model, objective, group, config)
    if config.sync == "parameter_server":
        return Served(model, objective, group, config)
    if config.sync in ("local_sgd", "diloco"):
        return Seldom(model, objective, group, config)
    if config.compress != "none":
        return Packed(model, objective, group, config)
    return Replicated(model, objective, group, config)
