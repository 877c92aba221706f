"""Splitting a model into consecutive stages, and running one stage by the model's own forward().

No graph is traced, so forward() may do whatever it likes. On each stage the whole forward() runs, but units of other
stages return placeholders, which have no values. The first unit of the stage gets the tensors that were received, and
the arguments of the next stage's first unit are kept for it. Where these, or the model's outputs, are placeholders, the
stages need more of each other, and the model is refused.

A dry run of the whole model shows the order of its units (repeated blocks, and the modules beside them), the
arguments they are called with and what they return.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.system.errors import ConfigError
from pipeline.system.torch_private import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from train.parallel.placeholder import NoValuesError, Placeholder, describe_line, has_placeholder
from train.pretrained.materialize import Materializer
from train.state import local_shard

META = torch.device("meta")
_CONTAINERS = (nn.ModuleList, nn.Sequential)


class Unit(NamedTuple):
    name: str  # as in named_modules()
    module: nn.Module
    repeated: bool  # a member of a ModuleList or a Sequential


def units(model: nn.Module, requested: Collection[str] = (), prefix: str = "") -> Iterator[Unit]:
    """Yield the outermost repeated blocks and the modules beside them; modules named in `requested` are units, too."""
    in_container = isinstance(model, _CONTAINERS)
    for child_name, child in model.named_children():
        name = f"{prefix}{child_name}"
        above_requested = any(other.startswith(f"{name}.") for other in requested)
        if name not in requested and (above_requested or _has_container(child, in_container)):
            yield from units(child, requested, f"{name}.")
        else:
            yield Unit(name, child, in_container)


def _has_container(module: nn.Module, in_container: bool) -> bool:
    """Return whether a module contains a list of repeated blocks; a repeated block itself is never searched."""
    if isinstance(module, _CONTAINERS):
        return True
    return not in_container and any(isinstance(child, _CONTAINERS) for child in module.modules())


def has_trained_parameters(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


Run = Callable[[int], Any]  # a forward pass of so many samples
SAMPLE_COUNTS = (2, 3)  # passes of two sizes show which axes grow with the number of samples, and how fast


@dataclass(frozen=True)
class ScalingShape:
    """The shape of a tensor for any number of samples."""

    two: tuple[int, ...]  # for two samples
    three: tuple[int, ...]  # for three
    dtype: torch.dtype

    def at(self, count: int) -> tuple[int, ...]:
        two, three = self.two, self.three
        return tuple(a + (b - a) * (count - SAMPLE_COUNTS[0]) for a, b in zip(two, three, strict=True))

    def numel(self, count: int) -> int:
        return torch.Size(self.at(count)).numel()

    def empty(self, count: int, device: torch.device) -> Tensor:
        return torch.empty(self.at(count), dtype=self.dtype, device=device)

    def narrow(self, tensor: Tensor, count: int) -> Tensor:
        """Return the part of a tensor of more samples."""
        return tensor[tuple(slice(size) for size in self.at(count))]

    def pad(self, tensor: Tensor, count: int) -> Tensor:
        """Add zeros for the samples that are missing."""
        missing = [size - own for size, own in zip(self.at(count), tensor.shape, strict=True)]
        padding = [number for size in reversed(missing) for number in (0, size)]
        return nn.functional.pad(tensor, padding) if any(missing) else tensor


@dataclass(frozen=True)
class OutputTemplate:
    """The structure that a unit returns, with shapes in place of tensors."""

    leaves: tuple[Any, ...]
    spec: TreeSpec
    requires_grad: bool  # of any tensor

    def fill(self, value: Callable[[ScalingShape], Tensor]) -> Any:
        leaves = [value(leaf) if isinstance(leaf, ScalingShape) else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.spec)


@dataclass
class Call:
    """How a unit was called; arguments that require a gradient were computed by trained units before it."""

    positions: tuple[int, ...]  # of these arguments among the flattened ones
    activations: list[Tensor]  # copies of the arguments
    output: Any = None


@dataclass(frozen=True)
class DryRun:
    order: list[str]  # units as they were called, some perhaps more than once
    calls: dict[str, Call]  # the first one of each unit
    activations: dict[str, list[ScalingShape]]
    templates: dict[str, OutputTemplate]
    outputs: Any  # of the whole model


def dry_run(row: Sequence[Unit], run: Run) -> DryRun:
    """Run the whole model on two and on three samples, and record the calls of its units."""
    (order, calls, outputs), (_, larger_calls, _) = (_record_calls(row, run, count) for count in SAMPLE_COUNTS)
    activations = {
        name: [
            ScalingShape(tuple(two.shape), tuple(three.shape), two.dtype)
            for two, three in zip(call.activations, larger_calls[name].activations, strict=True)
        ]
        for name, call in calls.items()
    }
    templates = {name: _template(call.output, larger_calls[name].output) for name, call in calls.items()}
    return DryRun(order, calls, activations, templates, outputs)


def _record_calls(row: Sequence[Unit], run: Run, count: int) -> tuple[list[str], dict[str, Call], Any]:
    order: list[str] = []
    calls: dict[str, Call] = {}
    handles = []
    for unit in row:

        def before(_: Any, args: Any, kwargs: Any, name: str = unit.name) -> None:
            order.append(name)
            leaves = tree_flatten((args, kwargs))[0]
            positions = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad)
            if name not in calls:
                copies = [leaves[i].clone(memory_format=torch.contiguous_format) for i in positions]
                calls[name] = Call(positions, copies)

        def after(_: Any, __: Any, output: Any, name: str = unit.name) -> None:
            calls[name].output = calls[name].output or tree_flatten(output)

        handles.append(unit.module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(unit.module.register_forward_hook(after))
    outputs = run(count)
    for handle in handles:
        handle.remove()
    return order, calls, outputs


def _template(two: tuple[list[Any], TreeSpec], three: tuple[list[Any], TreeSpec]) -> OutputTemplate:
    leaves = tuple(
        ScalingShape(tuple(a.shape), tuple(b.shape), a.dtype) if isinstance(a, Tensor) else a
        for a, b in zip(two[0], three[0], strict=True)
    )
    return OutputTemplate(leaves, two[1], any(isinstance(a, Tensor) and a.requires_grad for a in two[0]))


def choose_stage_starts(sizes: Sequence[int], may_start: Sequence[bool], stages: int) -> list[int]:
    """Return the indices of the units at which the later stages start, so that all have about as many parameters."""
    parameters_before = [0, *itertools.accumulate(sizes)]
    allowed = [index for index, may in enumerate(may_start) if may and parameters_before[index] > 0]
    chosen: list[int] = []
    for stage in range(1, stages):
        later_stages = stages - 1 - stage  # so many candidates must be left for them
        first_candidate = bisect.bisect_right(allowed, chosen[-1]) if chosen else 0
        candidates = allowed[first_candidate : len(allowed) - later_stages]
        if not candidates:
            raise ConfigError(split_problem(f"it has {len(allowed) + 1} repeated blocks with parameters, too few"))
        target = parameters_before[-1] * stage / stages
        chosen.append(min(candidates, key=lambda index: abs(parameters_before[index] - target)))
    return chosen


def check_stage_starts(model: nn.Module, names: Sequence[str], stages: int) -> None:
    """Refuse starts of stages that a task cannot name; no names leave the choice to us."""
    modules = {name for name, _ in model.named_modules()}
    if names and (len(set(names)) != stages - 1 or not modules.issuperset(names)):
        raise ConfigError(
            f"parallelize() names {', '.join(names)} as the first modules of stages; "
            f"train.pipeline_parallel={stages} needs the names of {stages - 1} modules of the model"
        )


def split_problem(reason: str) -> str:
    return (
        f"train.pipeline_parallel: the model cannot be split into stages: {reason}; "
        "to fix it: change the model, or use train.strategy=fsdp"
    )


class StagePlan:
    """The assignment of units and tensors to stages."""

    def __init__(self, model: nn.Module, row: Sequence[Unit], recorded: DryRun, starts: Sequence[str]) -> None:
        self.starts = list(starts)  # the first units of the second and later stages
        self.stages = len(starts) + 1
        self.stage_by_unit = self._assign_units(recorded.order)
        unit_by_tensor = {name: unit.name for unit in row for name in _tensor_names(unit)}
        self.stage_by_tensor = {  # by name in the state dict; what was never called belongs to the first stage
            name: self.stage_by_unit.get(unit_by_tensor[name], 0)
            if name in unit_by_tensor
            else self._stage_of_direct(tensor, recorded)
            for name, tensor in model.state_dict(keep_vars=True).items()
        }
        self.ties = find_ties(model, self.stage_by_tensor)

    def _assign_units(self, order: list[str]) -> dict[str, int]:
        stage = 0
        assigned: dict[str, int] = {}
        for name in order:
            if name in self.starts:
                if name in assigned:
                    raise ConfigError(split_problem(f"{name}, at which a stage starts, is called more than once"))
                stage += 1
            if assigned.setdefault(name, stage) != stage:
                raise ConfigError(split_problem(f"{name} is called in two stages"))
        return assigned

    def _stage_of_direct(self, tensor: Tensor, recorded: DryRun) -> int:
        """Return the stage that first uses a tensor outside all units; constants are on all stages."""
        if tensor.requires_grad:
            for stage, name in enumerate(self.starts):
                total = sum(activation.sum() for activation in recorded.calls[name].activations)
                assert isinstance(total, Tensor)
                if torch.autograd.grad(total, tensor, retain_graph=True, allow_unused=True)[0] is not None:
                    return stage
            return self.stages - 1
        return 0


class Stage:
    """One stage of a model that is split in place: weights of other stages take no memory."""

    def __init__(self, model: nn.Module, plan: StagePlan, recorded: DryRun, index: int, device: torch.device) -> None:
        self._model, self.index, self.is_last = model, index, index == plan.stages - 1
        self._device, self._count = device, 0
        self._received: Sequence[Tensor] = ()
        self._activations: list[Tensor] | None = None  # for the next stage
        self._start = plan.starts[index - 1] if index else ""  # the first unit
        self._next_start = "" if self.is_last else plan.starts[index]
        self.input_shapes = recorded.activations[self._start] if index else []
        self.output_shapes = [] if self.is_last else recorded.activations[self._next_start]
        self._drop_other_stages(plan, recorded)
        for name, hook in ((self._start, self._replace_arguments), (self._next_start, self._keep_arguments)):
            if name:
                unit, positions = model.get_submodule(name), recorded.calls[name].positions
                unit.register_forward_pre_hook(partial(hook, positions), with_kwargs=True)

    def run(self, received: Sequence[Tensor], count: int, work: Callable[[], Any]) -> Any:
        """Return what `work`, which calls the model on `count` samples, returns; or the tensors for the next stage.

        Once there are tensors for the next stage, nothing else matters here, nor do errors: the code that follows may
        need values that only later stages have.
        """
        self._received, self._count, self._activations = received, count, None
        try:
            result = work()
        except NoValuesError as error:
            if self._activations is None:
                reason = f"its forward() needs values of other stages, {describe_line(error)}"
                raise ConfigError(split_problem(reason)) from error
        except Exception:
            if self._activations is None:
                raise
        finally:
            self._received = ()
        if not self.is_last:
            return self._take_activations()
        named = result.items() if isinstance(result, Mapping) else [("", result)]
        for name, output in named:
            self._require_values(f"its output {name}".strip(), output)
        return result

    def check(self, recorded: DryRun, work: Callable[[], Any]) -> None:
        """Check that the stage makes of the activations of the dry run what the whole model made of them."""
        inputs = recorded.calls[self._start].activations if self.index else ()
        expected = recorded.outputs if self.is_last else recorded.calls[self._next_start].activations
        try:
            outputs = self.run([tensor.detach() for tensor in inputs], SAMPLE_COUNTS[0], work)
        except ConfigError:
            raise
        except Exception as error:  # the whole model had none
            reason = f"its forward() fails without values of other stages, {describe_line(error)}: {error}"
            raise ConfigError(split_problem(reason)) from error
        for a, b in zip(tree_leaves(outputs), tree_leaves(expected), strict=True):
            if not torch.allclose(a, b, rtol=0.01, atol=0.01 * float(b.detach().abs().max())):
                raise ConfigError(split_problem("its outputs change"))

    def _drop_other_stages(self, plan: StagePlan, recorded: DryRun) -> None:
        self.dropped = set()  # names of parameters of other stages
        for name, stage in plan.stage_by_unit.items():
            unit, template = self._model.get_submodule(name), recorded.templates[name]
            depends_on_trained = template.requires_grad and unit.state_dict()  # and may have running statistics
            if stage != self.index and (has_trained_parameters(unit) or depends_on_trained):
                unit.forward = partial(self._dummy_forward, template)
        for name, parameter in list(self._model.named_parameters(remove_duplicate=False)):
            if parameter.requires_grad and plan.stage_by_tensor[name] != self.index:
                self.dropped.add(name)
                path, _, own_name = name.rpartition(".")
                empty = nn.Parameter(Placeholder(parameter, self._device), requires_grad=False)
                setattr(self._model.get_submodule(path), own_name, empty)

    def _dummy_forward(self, template: OutputTemplate, *_: Any, **__: Any) -> Any:
        """Return placeholders in place of what a unit computes."""
        return template.fill(lambda shape: Placeholder(shape.empty(self._count, META), self._device))

    def _replace_arguments(self, positions: tuple[int, ...], _: nn.Module, args: Any, kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        for position, tensor in zip(positions, self._received, strict=True):
            leaves[position] = tensor
        return tree_unflatten(leaves, spec)

    def _keep_arguments(self, positions: tuple[int, ...], _: nn.Module, args: Any, kwargs: Any) -> None:
        if self._activations is None:
            leaves = tree_leaves((args, kwargs))
            self._activations = [leaves[position] for position in positions]

    def _take_activations(self) -> tuple[Tensor, ...]:
        activations, self._activations = self._activations, None
        if activations is None:
            raise ConfigError(split_problem(f"{self._next_start}, at which a stage starts, is not always called"))
        self._require_values(f"{self._next_start}, at which a stage starts,", activations)
        return tuple(activations)

    def _require_values(self, name: str, value: Any) -> None:
        if has_placeholder(value):
            received = f" besides those arguments of {self._start} that have a gradient" if self.index else ""
            raise ConfigError(split_problem(f"{name} needs values of other stages{received}"))


def _tensor_names(unit: Unit) -> list[str]:
    return [f"{unit.name}.{name}" for name in unit.module.state_dict(keep_vars=True)]


class TemporaryWeights:
    """Weights of a pretrained model for passes before it is split: one block's at a time, as they are not kept.

    A model that has its weights already needs nothing.
    """

    def __init__(self, materializer: Materializer | None, device: torch.device) -> None:
        self._materializer, self._device = materializer, device

    def of_module(self, module: nn.Module, name: str) -> contextlib.AbstractContextManager[None]:
        """Materialize the whole module within the context."""
        if self._materializer is None:
            return contextlib.nullcontext()
        return self._materializer.materialize_temporarily(module, self._device, f"{name}." if name else "")

    @contextlib.contextmanager
    def during_forward(self, model: nn.Module) -> Iterator[None]:
        """Materialize each repeated block during its forward pass, and all other modules within the context."""
        if self._materializer is None:
            yield
            return
        blocks = {unit.name: unit.module for unit in units(model) if unit.repeated}
        handles = [handle for name, block in blocks.items() for handle in self._add_hooks(block, name)]
        in_blocks = {id(module) for block in blocks.values() for module in block.modules()}
        try:
            with (
                self._materializer.materialize_temporarily(model, self._device, skip=in_blocks),
                self._materializer.reread_for_backward(self._device),
            ):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _add_hooks(self, block: nn.Module, name: str) -> Iterator[Any]:
        contexts: list[contextlib.ExitStack] = []

        def before(*_: Any) -> None:
            context = contextlib.ExitStack()
            context.enter_context(self.of_module(block, name))
            contexts.append(context)

        def after(*_: Any) -> None:
            contexts.pop().close()

        yield block.register_forward_pre_hook(before, prepend=True)
        yield block.register_forward_hook(after, always_call=True)


Value = TypeVar("Value")


@dataclass(frozen=True)
class Tie:
    """A weight used by several stages: its name on each of them, the owner's first."""

    names: Mapping[int, str]

    @property
    def owner(self) -> int:
        return next(iter(self.names))

    @property
    def name(self) -> str:
        """Return its name in the whole model."""
        return self.names[self.owner]


def find_ties(model: nn.Module, stage_by_tensor: Mapping[str, int]) -> list[Tie]:
    """Return the trained weights that several stages use; frozen ones stay equal by themselves."""
    names: dict[nn.Parameter, dict[int, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(parameter, {}).setdefault(stage_by_tensor[name], name)
    return [Tie(by_stage) for by_stage in names.values() if len(by_stage) > 1]


class TiedWeights:
    """The tied weights of one stage, such as an embedding that is the output layer, too.

    Every stage has its own copy, and copies stay equal because they get the sum of all gradients. The owner's gradient
    and optimizer state are counted and saved.
    """

    def __init__(self, ties: Sequence[Tie], stage: int, model: nn.Module) -> None:
        self._stage, self._model = stage, model
        self._ties = [tie for tie in ties if stage in tie.names]
        self._owned_elsewhere = {tie.names[stage]: tie.name for tie in self._ties if tie.owner != stage}

    @torch.no_grad()
    def sum_gradients(self, ranks: Sequence[int]) -> int:
        """Add up the gradients of all copies, `ranks` being those of the stages; return the bytes this process sent."""
        sent = 0
        for tie in self._ties:
            parameter = self._model.get_parameter(tie.names[self._stage])
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = local_shard(parameter.grad)
            other_ranks = [ranks[stage] for stage in tie.names if stage != tie.owner]
            if self._stage == tie.owner:
                sent += _sum_and_return(gradient, other_ranks)
            else:
                dist.send(gradient.contiguous(), ranks[tie.owner])
                dist.recv(gradient, ranks[tie.owner])
                sent += gradient.nbytes
        return sent

    def is_owned(self, parameter: nn.Parameter) -> bool:
        """Return whether this stage, and no other one, counts the gradient of the parameter."""
        return all(self._model.get_parameter(name) is not parameter for name in self._owned_elsewhere)

    def to_model_names(self, tensors: Mapping[str, Value]) -> dict[str, Value]:
        """Rename entries `NAME.WHAT` from the parameter's name on this stage to that in the whole model."""
        return {_rename(key, self._owned_elsewhere): value for key, value in tensors.items()}

    def to_stage_names(self, tensors: Mapping[str, Value]) -> dict[str, Value]:
        """Rename entries `NAME.WHAT` from the parameter's name in the whole model to that on this stage."""
        names = {name: own for own, name in self._owned_elsewhere.items()}
        return {_rename(key, names): value for key, value in tensors.items()}

    def only_owned(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Leave out what another stage saves; names are those of the whole model."""
        others = set(self._owned_elsewhere.values())
        return {key: tensor for key, tensor in tensors.items() if key.rpartition(".")[0] not in others}


def _sum_and_return(gradient: Tensor, ranks: Sequence[int]) -> int:
    """Add up in the order of the stages and send the sum back, so that it has the same bits on all."""
    received = torch.empty_like(gradient)
    for rank in ranks:
        dist.recv(received, rank)
        gradient += received
    for rank in ranks:
        dist.send(gradient.contiguous(), rank)
    return gradient.nbytes * len(ranks)


def _rename(key: str, names: Mapping[str, str]) -> str:
    name, dot, suffix = key.rpartition(".")
    return names.get(name, name) + dot + suffix
