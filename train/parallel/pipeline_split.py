"""Cutting a model into consecutive stages, and running one of them by the model's own forward().

No graph is traced, so that a model may do in forward() what it likes. On each stage the whole forward() runs, but
units of earlier stages answer with NaNs, the first unit of the stage is handed what came over the wire, and the call
of the first unit of the next stage ends the pass. Nothing of what earlier units answer may matter then: should it,
the outputs are NaN, and the check after the cut refuses the model.

What a pass of the whole model shows about its units: their order, what they are called with and what they answer.

A model as the row of its outermost repeated blocks and of what stands beside them.

Weights for a look at what a model does before it is cut: one block's at a time, as they will not be kept.

A weight that several stages use, as an embedding that is the head too: each has its own, kept equal by their sum.

The stage of the weight's first name tells its gradient and moments; the others have the same, by what is added up.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from pipeline.contract.errors import ConfigError
from train.pretrained.fill import Filling


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


CPU = torch.device("cpu")


class Lent:
    """Of a model that has its weights, nothing is to be lent."""

    def __init__(self, filling: Filling | None = None, device: torch.device = CPU) -> None:
        self._filling, self._device = filling, device

    def module(self, module: nn.Module, name: str) -> contextlib.AbstractContextManager[None]:
        """All of it, for as long as the context is open."""
        if self._filling is None:
            return contextlib.nullcontext()
        return self._filling.lend(module, self._device, f"{name}." if name else "")

    @contextlib.contextmanager
    def passing(self, model: nn.Module) -> Iterator[None]:
        """For passes of the whole model: a repeated block while it works, what stands beside them all the time."""
        if self._filling is None:
            yield
            return
        blocks = {unit.name: unit.module for unit in units(model) if unit.repeated}
        handles = [handle for name, block in blocks.items() for handle in self._hooks(block, name)]
        inside = {id(below) for block in blocks.values() for below in block.modules()}
        try:
            with self._filling.lend(model, self._device, skip=inside), self._filling.remembering(self._device):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _hooks(self, block: nn.Module, name: str) -> Iterator[Any]:
        held: list[contextlib.ExitStack] = []

        def before(*_: Any) -> None:
            stack = contextlib.ExitStack()
            stack.enter_context(self.module(block, name))
            held.append(stack)

        def after(*_: Any) -> None:
            held.pop().close()

        yield block.register_forward_pre_hook(before, prepend=True)
        yield block.register_forward_hook(after, always_call=True)


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
