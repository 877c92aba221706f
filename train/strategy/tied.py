"""A weight that several stages use, as an embedding that is the head too: each has its own, kept equal by their sum.

The stage of the weight's first name tells its gradient and moments; the others have the same, by what is added up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

Value = TypeVar("Value")


@dataclass(frozen=True)
class Tie:
    """By stage, the name it has there; the first one is the keeper's, and the weight's in the whole model."""

    names: Mapping[int, str]

    @property
    def keeper(self) -> int:
        return next(iter(self.names))

    @property
    def name(self) -> str:
        return self.names[self.keeper]


def find_ties(model: nn.Module, stages: Mapping[str, int]) -> list[Tie]:
    """`stages` says where each name is used. What is frozen stays equal by itself."""
    found: dict[nn.Parameter, dict[int, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            found.setdefault(parameter, {}).setdefault(stages[name], name)
    return [Tie(names) for names in found.values() if len(names) > 1]


class Tied:
    """Those of one stage, after it was cut."""

    def __init__(self, ties: Sequence[Tie], stage: int, model: nn.Module) -> None:
        self._stage, self._model = stage, model
        self._ties = [tie for tie in ties if stage in tie.names]
        self._kept_elsewhere = {tie.names[stage]: tie.name for tie in self._ties if tie.keeper != stage}

    @torch.no_grad()
    def add_up(self, rank: int) -> int:
        """Stages are neighbouring ranks; returns the bytes this process handed over."""
        sent = 0
        for tie in self._ties:
            parameter = self._model.get_parameter(tie.names[self._stage])
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            others = [rank - self._stage + stage for stage in tie.names if stage != tie.keeper]
            if self._stage == tie.keeper:
                sent += _gather(gradient, others)
            else:
                keeper = rank - self._stage + tie.keeper
                dist.send(gradient.contiguous(), keeper)
                dist.recv(gradient, keeper)
                sent += gradient.nbytes
            parameter.grad = gradient
        return sent

    def counts(self, parameter: nn.Parameter) -> bool:
        """Whether its gradient is told here, and not by the keeper."""
        return all(self._model.get_parameter(name) is not parameter for name in self._kept_elsewhere)

    def of_whole(self, tensors: Mapping[str, Value]) -> dict[str, Value]:
        """What belongs to parameters, `NAME.WHAT`, by their names in the whole model."""
        return {_renamed(key, self._kept_elsewhere): value for key, value in tensors.items()}

    def of_stage(self, tensors: Mapping[str, Value]) -> dict[str, Value]:
        """The other way round."""
        back = {name: own for own, name in self._kept_elsewhere.items()}
        return {_renamed(key, back): value for key, value in tensors.items()}

    def without(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Only what the keeper does not tell, of names in the whole model."""
        kept = set(self._kept_elsewhere.values())
        return {key: tensor for key, tensor in tensors.items() if key.rpartition(".")[0] not in kept}


def _gather(gradient: Tensor, others: Sequence[int]) -> int:
    """In the order of the stages, so that the sum has the same bits on all."""
    for other in others:
        dist.recv(found := torch.empty_like(gradient), other)
        gradient += found
    for other in others:
        dist.send(gradient.contiguous(), other)
    return gradient.nbytes * len(others)


def _renamed(key: str, names: Mapping[str, str]) -> str:
    name, dot, what = key.rpartition(".")
    return names.get(name, name) + dot + what
