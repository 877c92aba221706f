"""Cutting a model into consecutive stages, and running one of them by the model's own forward().

No graph is traced, so that a model may do in forward() what it likes. On each stage the whole forward() runs, but
units of earlier stages answer with NaNs, the first unit of the stage is handed what came over the wire, and the call
of the first unit of the next stage ends the pass. Nothing of what earlier units answer may matter then: should it,
the outputs are NaN, and the check after the cut refuses the model.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from pipeline.spec.errors import ConfigError
from train.strategy.rehearsal import Answer, Rehearsal
from train.strategy.tied import find_ties
from train.strategy.units import Unit, holds_parameters


class Reached(BaseException):
    """The next stage begins here. No error, and nothing a model's `except Exception` may hold up."""

    def __init__(self, carried: tuple[Tensor, ...]) -> None:
        self.carried = carried


class Cut:
    """Which stage holds what."""

    def __init__(self, model: nn.Module, row: Sequence[Unit], seen: Rehearsal, begins: Sequence[str]) -> None:
        self.begins = list(begins)  # the first units of the second and later stages
        self.stages = len(begins) + 1
        self.units = self._of_units(seen.order)
        below = {name: unit.name for unit in row for name in _names(unit)}
        self.tensors = {  # by name in the state dict; what was never called goes with the first stage
            name: self.units.get(below[name], 0) if name in below else self._of_direct(tensor, seen)
            for name, tensor in model.state_dict(keep_vars=True).items()
        }
        self.ties = find_ties(model, self.tensors)

    def _of_units(self, order: list[str]) -> dict[str, int]:
        stage = 0
        found: dict[str, int] = {}
        for name in order:
            if name in self.begins:
                if name in found:
                    raise ConfigError(cannot(f"{name}, at which a stage begins, is called more than once"))
                stage += 1
            if found.setdefault(name, stage) != stage:
                raise ConfigError(cannot(f"{name} is called in two stages"))
        return found

    def _of_direct(self, tensor: Tensor, seen: Rehearsal) -> int:
        """A parameter beside the units: it belongs where it is first used; constants are everywhere."""
        if tensor.requires_grad:
            for stage, name in enumerate(self.begins):
                carried = sum(part.sum() for part in seen.calls[name].carried)
                assert isinstance(carried, Tensor)
                if torch.autograd.grad(carried, tensor, retain_graph=True, allow_unused=True)[0] is not None:
                    return stage
            return self.stages - 1
        return 0


class Stage:
    """One stage of a model that is cut in place: weights of other stages take no memory."""

    def __init__(self, model: nn.Module, cut: Cut, seen: Rehearsal, index: int, device: torch.device) -> None:
        self._model, self.index, self.last = model, index, index == cut.stages - 1
        self._received: tuple[Tensor, ...] = ()
        self._count, self._device = 0, device
        self.takes = seen.carried[cut.begins[index - 1]] if index else []
        self.gives = [] if self.last else seen.carried[cut.begins[index]]
        self._leave_out(cut, seen)
        if index:
            name = cut.begins[index - 1]
            model.get_submodule(name).register_forward_pre_hook(
                _taking(self, seen.calls[name].places), with_kwargs=True
            )
        if not self.last:
            name = cut.begins[index]
            model.get_submodule(name).register_forward_pre_hook(_giving(seen.calls[name].places), with_kwargs=True)

    def run(self, received: tuple[Tensor, ...], count: int, work: Callable[[], Any]) -> Any:
        """What `work`, which calls the model on `count` samples, returns; on other stages what the next one gets."""
        self._received, self._count = received, count
        try:
            return work()
        except Reached as reached:
            return reached.carried
        finally:
            self._received = ()

    @property
    def received(self) -> tuple[Tensor, ...]:
        return self._received

    def absent(self, answer: Answer) -> Callable[..., Any]:
        def forward(*_: Any, **__: Any) -> Any:
            return answer.of(lambda shape: _nothing(shape.at(self._count), shape.dtype, self._device))

        return forward

    def _leave_out(self, cut: Cut, seen: Rehearsal) -> None:
        self.left_out = set()  # parameters of other stages
        for name, stage in cut.units.items():
            unit = self._model.get_submodule(name)
            if stage < self.index and holds_parameters(unit):
                unit.forward = self.absent(seen.answers[name])
        for name, parameter in list(self._model.named_parameters(remove_duplicate=False)):
            if parameter.requires_grad and cut.tensors[name] != self.index:
                self.left_out.add(name)
                path, _, own = name.rpartition(".")
                empty = nn.Parameter(_nothing(parameter.shape, parameter.dtype, self._device), requires_grad=False)
                setattr(self._model.get_submodule(path), own, empty)


def choose_begins(sizes: Sequence[int], may_begin: Sequence[bool], stages: int) -> list[int]:
    """Places in the row of units at which the later stages begin, so that all hold about as many parameters."""
    before = [0, *itertools.accumulate(sizes)]
    allowed = [place for place, may in enumerate(may_begin) if may and before[place] > 0]
    chosen: list[int] = []
    for stage in range(1, stages):
        left = stages - 1 - stage  # that many must stay for the later stages
        free = allowed[bisect.bisect_right(allowed, chosen[-1]) if chosen else 0 : len(allowed) - left]
        if not free:
            raise ConfigError(cannot(f"it has {len(allowed) + 1} repeated blocks with parameters, too few"))
        goal = before[-1] * stage / stages
        chosen.append(min(free, key=lambda place: abs(before[place] - goal)))
    return chosen


def check_begins(model: nn.Module, names: Sequence[str], stages: int) -> None:
    """What a task names as beginnings of stages; nothing leaves the choice to us."""
    known = {name for name, _ in model.named_modules()}
    if names and (len(set(names)) != stages - 1 or not known.issuperset(names)):
        raise ConfigError(
            f"parallelize() names {', '.join(names)} as beginnings of stages; "
            f"train.pipeline={stages} needs the names of {stages - 1} modules of the model"
        )


def _taking(stage: Stage, places: tuple[int, ...]) -> Callable[..., Any]:
    def hook(_: nn.Module, args: Any, kwargs: Any) -> Any:
        leaves, tree = tree_flatten((args, kwargs))
        for place, tensor in zip(places, stage.received, strict=True):
            leaves[place] = tensor
        return tree_unflatten(leaves, tree)

    return hook


def _giving(places: tuple[int, ...]) -> Callable[..., Any]:
    def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
        leaves = tree_flatten((args, kwargs))[0]
        raise Reached(tuple(leaves[place] for place in places))

    return hook


def _nothing(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Not a number, as often as wanted, in the memory of one."""
    value = torch.nan if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device=device).expand(*shape)


def _names(unit: Unit) -> list[str]:
    return [f"{unit.name}.{name}" for name in unit.module.state_dict(keep_vars=True)]


def cannot(why: str) -> str:
    return f"train.pipeline: the model cannot be cut into stages: {why}; mend that, or use parallel=fsdp"
