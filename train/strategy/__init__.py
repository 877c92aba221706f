"""How one model lives on several processes, chosen by the words of the train section."""

from __future__ import annotations

from torch import nn

from pipeline.spec.sections import Train
from train.group import Group
from train.objective import Objective
from train.strategy.alone import Alone, Part
from train.strategy.packed import Packed
from train.strategy.replicated import Replicated
from train.strategy.sharded import Sharded
from train.strategy.traffic import Traffic

__all__ = ["Alone", "Part", "Traffic", "make_strategy"]


def make_strategy(model: nn.Module, objective: Objective, group: Group, config: Train) -> Alone:
    if group.size == 1:
        return Alone(model, objective, group, config)
    if config.compress != "none":
        return Packed(model, objective, group, config)
    if config.parallel == "fsdp":
        return Sharded(model, objective, group, config)
    return Replicated(model, objective, group, config)
