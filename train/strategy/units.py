"""A model as the row of its outermost repeated blocks and of what stands beside them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from torch import nn

_ROWS = (nn.ModuleList, nn.Sequential)


class Unit(NamedTuple):
    name: str  # as in named_modules()
    module: nn.Module
    repeated: bool  # a member of a ModuleList or a Sequential


def units(model: nn.Module, wanted: Collection[str] = (), prefix: str = "") -> Iterator[Unit]:
    """What lies inside a repeated block is not looked at: the block is the unit. `wanted` are units in any case."""
    inside_row = isinstance(model, _ROWS)
    for child_name, child in model.named_children():
        name = f"{prefix}{child_name}"
        above_wanted = any(other.startswith(f"{name}.") for other in wanted)
        if name not in wanted and (above_wanted or _holds_row(child, inside_row)):
            yield from units(child, wanted, f"{name}.")
        else:
            yield Unit(name, child, inside_row)


def _holds_row(module: nn.Module, inside_row: bool) -> bool:
    return isinstance(module, _ROWS) or (not inside_row and any(isinstance(below, _ROWS) for below in module.modules()))


def holds_parameters(module: nn.Module) -> bool:
    """Such that are trained."""
    return any(parameter.requires_grad for parameter in module.parameters())
