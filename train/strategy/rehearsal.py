"""What a pass of the whole model shows about its units: their order, what they are called with and what they answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from train.strategy.units import Unit

Run = Callable[[int], Any]  # a forward pass of so many samples
FEW = (2, 3)  # passes of two sizes tell which axes grow with the samples, and how fast


@dataclass(frozen=True)
class Shape:
    """Of a tensor, for any number of samples."""

    few: tuple[int, ...]
    more: tuple[int, ...]
    dtype: torch.dtype

    def at(self, count: int) -> tuple[int, ...]:
        return tuple(two + (three - two) * (count - FEW[0]) for two, three in zip(self.few, self.more, strict=True))

    def numel(self, count: int) -> int:
        return torch.Size(self.at(count)).numel()


@dataclass(frozen=True)
class Answer:
    """What a unit returns, without its values."""

    leaves: tuple[Any, ...]
    tree: TreeSpec

    def of(self, value: Callable[[Shape], Tensor]) -> Any:
        return tree_unflatten([value(leaf) if isinstance(leaf, Shape) else leaf for leaf in self.leaves], self.tree)


@dataclass
class Call:
    """How a unit was called: the arguments that carry a gradient are those made by trained units before it."""

    places: tuple[int, ...]  # among the flattened arguments
    carried: list[Tensor]
    answer: Any = None


@dataclass(frozen=True)
class Rehearsal:
    order: list[str]  # units as they were called, some perhaps more than once
    calls: dict[str, Call]  # the first one of each
    carried: dict[str, list[Shape]]
    answers: dict[str, Answer]
    outputs: Any  # of the whole model


def rehearse(row: Sequence[Unit], run: Run) -> Rehearsal:
    (order, few, outputs), (_, more, _) = (_listen(row, run, count) for count in FEW)
    carried = {
        name: [
            Shape(tuple(two.shape), tuple(three.shape), two.dtype)
            for two, three in zip(call.carried, more[name].carried, strict=True)
        ]
        for name, call in few.items()
    }
    answers = {name: _answer(call.answer, more[name].answer) for name, call in few.items()}
    return Rehearsal(order, few, carried, answers, outputs)


def _listen(row: Sequence[Unit], run: Run, count: int) -> tuple[list[str], dict[str, Call], Any]:
    order: list[str] = []
    calls: dict[str, Call] = {}
    handles = []
    for unit in row:

        def before(_: Any, args: Any, kwargs: Any, name: str = unit.name) -> None:
            order.append(name)
            leaves = tree_flatten((args, kwargs))[0]
            places = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad)
            calls.setdefault(name, Call(places, [leaves[i] for i in places]))

        def after(_: Any, __: Any, output: Any, name: str = unit.name) -> None:
            calls[name].answer = calls[name].answer or tree_flatten(output)

        handles.append(unit.module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(unit.module.register_forward_hook(after))
    outputs = run(count)
    for handle in handles:
        handle.remove()
    return order, calls, outputs


def _answer(few: tuple[list[Any], TreeSpec], more: tuple[list[Any], TreeSpec]) -> Answer:
    leaves = tuple(
        Shape(tuple(two.shape), tuple(three.shape), two.dtype) if isinstance(two, Tensor) else two
        for two, three in zip(few[0], more[0], strict=True)
    )
    return Answer(leaves, few[1])
