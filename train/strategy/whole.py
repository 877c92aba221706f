"""The state of a model whose parts are on several processes, put together by name, and taken apart again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from train.group import Group


def gather_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, own: Collection[str], group: Group
) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Weights and optimizer state on the first process; `own` are the names in the state dict this one answers for."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters() if name in own}
    mine = {
        "weights": {name: tensor.detach().cpu() for name, tensor in model.state_dict().items() if name in own},
        "state": {names[p]: _cpu(state) for p, state in optimizer.state.items() if p in names},
        "groups": [_named(group, names) for group in optimizer.param_groups],
    }
    weights: dict[str, Tensor] = {}
    state: dict[str, Any] = {}
    groups: dict[bool, dict[str, Any]] = {}
    for part in group.collect(mine):
        weights |= part["weights"]
        state |= part["state"]
        for decayed, found in part["groups"]:
            groups.setdefault(decayed, {**found, "params": []})["params"] += found["params"]
    if not group.rank.first:
        return None
    ordered = {name: weights[name] for name in model.state_dict()}
    return ordered, {"state": state, "param_groups": [groups[kind] for kind in sorted(groups, reverse=True)]}


def take_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """What belongs to this process's parameters; the optimizer's groups stay as they are."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    held = {i: state[names[parameter]] for i, parameter in enumerate(order) if names[parameter] in state}
    optimizer.load_state_dict({"state": held, "param_groups": optimizer.state_dict()["param_groups"]})


def _named(group: Mapping[str, Any], names: Mapping[Tensor, str]) -> tuple[bool, dict[str, Any]]:
    """A group, told from others by what tells them apart in the making: parameters of one axis are not decayed."""
    parameters = group["params"]
    return parameters[0].ndim > 1, {**group, "params": [names[p] for p in parameters if p in names]}


def _cpu(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in state.items()}
