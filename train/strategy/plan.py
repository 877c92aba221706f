"""How each layer is cut over the processes of a tensor group: by the task's `parallelize`, or by a plan found here.

The plan is found by the names transformers give their layers, and names prove nothing. So each kind of module that
is cut is run once, whole and cut, on what it really receives, and all its gradients must agree.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._pytree import tree_leaves

from pipeline.spec.errors import ConfigError
from pipeline.spec.task import HasParallelize, Task
from train.families.adapted import styles
from train.families.experts import check_experts, cut_experts, find_experts
from train.families.latent import cut_by_outputs, join_rotary
from train.strategy.lent import Lent
from train.strategy.pairs import find_pairs, share_heads

Run = Callable[[], Any]  # a forward pass of the whole model on a few samples
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def cut_layers(model: nn.Module, task: Task, mesh: DeviceMesh, run: Run, lent: Lent | None = None) -> None:
    """In place; afterwards the model answers as before, every process holding its part of the layers."""
    lent = lent or Lent()
    model.eval()
    if isinstance(task, HasParallelize):
        with torch.no_grad():
            with lent.passing(model):
                before = _tensors(run())
            task.parallelize(model, mesh)
            with lent.passing(model):
                after = _tensors(run())
            if not _agree(after, before):
                raise ConfigError("parallelize(): the model's outputs differ from those of the whole model")
    else:
        _cut_by_names(model, mesh, run, lent)
    model.train()


def _cut_by_names(model: nn.Module, mesh: DeviceMesh, run: Run, lent: Lent) -> None:
    pairs = find_pairs(model, mesh.size())
    with lent.passing(model):
        received = dict(_received(model, [pair.owner for pair in pairs], run))
    whole = {name: copy.deepcopy(model.get_submodule(name)) for name in received}
    for pair in pairs:
        share_heads(model, pair, mesh.size())
    ways = [(name, True) for pair in pairs for name in pair.columns] + [(pair.row, False) for pair in pairs]
    parallelize_module(
        model,
        mesh,
        {
            part: style
            for name, by_outputs in ways
            for part, style in styles(name, model.get_submodule(name), by_outputs=by_outputs).items()
        },
    )
    for owner in {pair.owner: model.get_submodule(pair.owner) for pair in pairs}.values():
        if cut_by_outputs(owner):
            join_rotary(owner, mesh)
    for name, arguments in received.items():
        cut = model.get_submodule(name)
        with lent.module(cut, name), lent.module(whole[name], name):
            _compare(name, cut, whole[name], arguments)


def cut_mixtures(model: nn.Module, mesh: DeviceMesh, run: Run, lent: Lent) -> list[nn.Module]:
    """The experts of all layers, over both axes of `mesh`, `expert` and `tensor`; proven as other layers are."""
    layers = find_experts(model)
    check_experts(layers, mesh.size(0), mesh.size(1))
    model.eval()
    with lent.passing(model):
        received = dict(_received(model, list(layers), run))
    whole = {name: copy.deepcopy(model.get_submodule(name)) for name in received}
    for module in layers.values():
        cut_experts(module, mesh)
    for name, arguments in received.items():
        cut = model.get_submodule(name)
        with lent.module(cut, name), lent.module(whole[name], name):
            _compare(name, cut, whole[name], arguments, "expert" if mesh.size(0) > 1 else "tensor")
    model.train()
    return list(layers.values())


def _received(model: nn.Module, owners: Sequence[str], run: Run) -> Iterator[tuple[str, Arguments]]:
    """What the first module of each kind is called with; a kind is a class with parameters of the same shapes."""
    calls: dict[str, Arguments] = {}
    handles = []
    for name in dict.fromkeys(owners):

        def keep(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            calls.setdefault(name, copy.deepcopy((args, kwargs)))  # a cache among them may grow during the call

        handles.append(model.get_submodule(name).register_forward_pre_hook(keep, with_kwargs=True))
    with torch.no_grad():
        run()
    for handle in handles:
        handle.remove()
    known = set()
    for owner in owners:
        kind = _kind(model.get_submodule(owner))
        if owner in calls and kind not in known:
            known.add(kind)
            yield owner, calls[owner]
    if missed := [owner for owner in owners if _kind(model.get_submodule(owner)) not in known]:
        raise ConfigError(_cannot(missed[0], "the model does not call it, so the cut cannot be checked"))


def _kind(module: nn.Module) -> tuple[Any, ...]:
    return (type(module), *((name, parameter.shape) for name, parameter in module.named_parameters()))


def _compare(name: str, cut: nn.Module, whole: nn.Module, arguments: Arguments, word: str = "tensor") -> None:
    """The same gradient for every parameter: then the outputs are the same, and what stands between the cut layers."""
    expected = _gradients(whole, arguments)
    try:
        found = _gradients(cut, arguments)
    except (RuntimeError, ValueError, AssertionError) as error:
        text = " ".join(str(error).split())[:200]
        raise ConfigError(
            _cannot(name, f"it does not run with a part of its heads or channels ({text})", word)
        ) from error
    largest = max((float(gradient.abs().max()) for gradient in expected.values()), default=0.0)
    for parameter, gradient in expected.items():
        if not _agree([found[parameter]], [gradient], noise=1e-5 * largest):
            raise ConfigError(
                _cannot(name, f"the gradient of its {parameter} is another one than that of the whole module", word)
            )


def _gradients(module: nn.Module, arguments: Arguments) -> Mapping[str, Tensor]:
    args, kwargs = copy.deepcopy(arguments)
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    answers = _tensors(module(*args, **kwargs))
    if not parameters:  # frozen
        return {f"output {i}": answer.detach() for i, answer in enumerate(answers)}
    outputs = [tensor for tensor in answers if tensor.requires_grad]
    ends = [torch.arange(float(tensor.numel()), device=tensor.device).sin().view_as(tensor) for tensor in outputs]
    found = torch.autograd.grad(
        outputs,
        list(parameters.values()),
        [end.to(out) for end, out in zip(ends, outputs, strict=True)],
        allow_unused=True,
    )
    return {
        name: torch.zeros_like(parameter) if gradient is None else _full(gradient)
        for (name, parameter), gradient in zip(parameters.items(), found, strict=True)
    }


def _agree(found: list[Tensor], expected: list[Tensor], noise: float = 0.0) -> bool:
    """A wrong cut is wrong by as much as the values themselves; what is allowed here is rounding."""
    pairs = zip(found, expected, strict=True)
    return all(bool((_full(a) - b).abs().max() <= 0.01 * b.abs().max() + noise) for a, b in pairs)


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _cannot(name: str, why: str, word: str = "tensor") -> str:
    instead = "write parallelize(model, mesh) in the task" if word == "tensor" else "use train.expert=1"
    return f"train.{word}: {name or 'the model'} cannot be cut: {why}; {instead}"
