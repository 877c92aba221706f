"""A model as the row of its outermost repeated blocks and of what stands beside them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

_ROWS = (nn.ModuleList, nn.Sequential)


class Unit(NamedTuple):
    name: str  # as in named_modules()
    module: nn.Module
    repeated: bool  # a member of a ModuleList or a Sequential


def units(model: nn.Module, prefix: str = "") -> Iterator[Unit]:
    """What lies inside a repeated block is not looked at: the block is the unit."""
    inside_row = isinstance(model, _ROWS)
    for name, child in model.named_children():
        holds_row = isinstance(child, _ROWS) or (
            not inside_row and any(isinstance(module, _ROWS) for module in child.modules())
        )
        if holds_row:
            yield from units(child, f"{prefix}{name}.")
        else:
            yield Unit(f"{prefix}{name}", child, inside_row)


def holds_parameters(module: nn.Module) -> bool:
    """Such that are trained."""
    return any(parameter.requires_grad for parameter in module.parameters())
