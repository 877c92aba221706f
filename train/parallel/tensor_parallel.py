"""How each layer is cut over the processes of a tensor group: by the task's `parallelize`, or by a plan found here.

The plan is found by the names transformers give their layers, and names prove nothing. So each kind of module that
is cut is run once, whole and cut, on what it really receives, and all its gradients must agree.

Pairs of linear layers that can be cut together: the outputs of the first are the inputs of the second.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._pytree import tree_leaves

from pipeline.contract.errors import ConfigError
from pipeline.contract.task import HasParallelize, Task
from train.parallel.experts import (
    check_experts,
    cut_by_outputs,
    cut_experts,
    find_experts,
    join_rotary,
    linear_in,
    styles,
)
from train.parallel.pipeline_split import Lent

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


# Names as models in use have them, below the module that owns both: layers cut by output, then the one cut by input.
# Those with more layers stand first: w1 and w3 belong to one pair where both are there.
_ATTENTION = (
    (("q_proj", "k_proj", "v_proj"), ("o_proj", "out_proj", "c_proj", "proj", "dense")),
    (("query", "key", "value"), ("dense", "out", "out_proj", "proj", "output")),
    (("self.query", "self.key", "self.value"), ("output.dense",)),
    (("attention.query", "attention.key", "attention.value"), ("output.dense",)),
    (("wq", "wk", "wv"), ("wo",)),
    (("w_q", "w_k", "w_v"), ("w_o",)),
    (("to_q", "to_k", "to_v"), ("to_out", "to_out.0")),
    (("q_lin", "k_lin", "v_lin"), ("out_lin",)),
    (("q", "k", "v"), ("o", "out", "proj")),
)
_MLP = (
    (("gate_proj", "up_proj"), ("down_proj",)),
    (("w1", "w3"), ("w2",)),
    (("wi_0", "wi_1"), ("wo",)),
    (("w1",), ("w2",)),
    (("wi",), ("wo",)),
    (("up_proj",), ("down_proj",)),
    (("fc1",), ("fc2",)),
    (("fc_in",), ("fc_out",)),
    (("lin1",), ("lin2",)),
    (("linear1",), ("linear2",)),
    (("c_fc",), ("c_proj",)),
    (("intermediate.dense",), ("output.dense",)),
)
_FUSED = {"c_attn", "qkv", "qkv_proj", "to_qkv", "Wqkv", "wqkv", "query_key_value", "in_proj", "gate_up_proj"}
_HEADS = {
    *("heads", "n_heads", "num_heads", "n_head", "nhead", "num_attention_heads", "n_local_heads"),
    *("kv_heads", "n_kv_heads", "num_kv_heads", "n_kv_head", "num_key_value_heads", "n_local_kv_heads"),
}
_BETWEEN = (
    *(nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Softplus, nn.Mish, nn.Hardswish),
    *(nn.Dropout, nn.Identity),
)


class Pair(NamedTuple):
    owner: str  # the module that calls them
    columns: tuple[str, ...]  # cut by outputs
    row: str  # cut by inputs
    attention: bool


def find_pairs(model: nn.Module, size: int) -> list[Pair]:
    """All there are, none of whose layers is in two; what looks like one and cannot be cut is refused by name."""
    _refuse_fused(model)
    pairs: list[Pair] = []
    taken: set[str] = set()
    for pair in _candidates(model):
        layers = {*pair.columns, pair.row}
        if not layers & taken:
            _check(model, pair, size)
            taken |= layers
            pairs.append(pair)
    if not pairs:
        raise ConfigError(
            f"train.tensor={size}: the model has no pair of linear layers with names of a transformer, and no row of "
            "Linear, activation, Linear; write parallelize(model, mesh) in the task"
        )
    return pairs


def share_heads(model: nn.Module, pair: Pair, size: int) -> None:
    """A process computes its part of the heads: where their number is written down, it is that of the part."""
    if pair.attention:
        holder = model.get_submodule(pair.columns[0].rpartition(".")[0])
        for name, count in _heads(holder).items():
            setattr(holder, name, count // size)


def _candidates(model: nn.Module) -> Iterator[Pair]:
    for owner, module in model.named_modules():
        if latent := _latent(module):
            columns = tuple(_below(owner, name) for name in latent)
            yield Pair(owner, columns, _below(owner, "o_proj"), attention=True)
        for families, attention in ((_ATTENTION, True), (_MLP, False)):
            for columns, rows in families:
                for row in rows:
                    if _fits(module, columns, row):
                        yield Pair(owner, tuple(_below(owner, name) for name in columns), _below(owner, row), attention)
        if isinstance(module, nn.Sequential):
            yield from _neighbours(owner, module)


def _latent(module: nn.Module) -> tuple[str, ...]:
    names = cut_by_outputs(module)
    return names if all(_layer(module, name) is not None for name in (*names, "o_proj")) else ()


def _fits(module: nn.Module, columns: tuple[str, ...], row: str) -> bool:
    layers = [_layer(module, name) for name in (*columns, row)]
    found = [layer for layer in layers if layer is not None]
    return len(found) == len(layers) and found[0].out_features == found[-1].in_features


def _layer(module: nn.Module, path: str) -> nn.Linear | None:
    for name in path.split("."):
        child = module._modules.get(name)
        if child is None:
            return None
        module = child
    return linear_in(module)


def _neighbours(owner: str, row: nn.Sequential) -> Iterator[Pair]:
    """Linear, something that works on each number by itself, Linear."""
    modules = list(row.named_children())
    linear = [place for place, (_, module) in enumerate(modules) if isinstance(module, nn.Linear)]
    for start, stop in itertools.pairwise(linear):
        if all(isinstance(module, _BETWEEN) for _, module in modules[start + 1 : stop]):
            first, second = (_below(owner, modules[place][0]) for place in (start, stop))
            yield Pair(owner, (first,), second, attention=False)


def _check(model: nn.Module, pair: Pair, size: int) -> None:
    holder = pair.columns[0].rpartition(".")[0]
    for name, count in _heads(model.get_submodule(holder)).items():
        if pair.attention and count % size:
            _refuse(holder, f"{size} processes cannot share its {count} heads ({name})")
    width = getattr(model.get_submodule(holder), "head_dim", None) if pair.attention else None
    for name in pair.columns:
        layer = _layer(model, name)
        if layer and isinstance(width, int) and layer.out_features // width % size:
            _refuse(name, f"{size} processes cannot share its {layer.out_features // width} heads")
        if layer and layer.out_features % size:
            _refuse(name, f"{size} processes cannot share its {layer.out_features} outputs")


def _heads(holder: nn.Module) -> dict[str, int]:
    return {name: value for name, value in vars(holder).items() if name in _HEADS and isinstance(value, int)}


def _refuse_fused(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            _refuse(name, "nn.MultiheadAttention has queries, keys and values in one matrix")
        if name.rpartition(".")[2] in _FUSED and any(True for _ in module.parameters()):
            _refuse(name, "it has several matrices in one")


def _refuse(name: str, why: str) -> None:
    raise ConfigError(f"train.tensor: {name} cannot be cut: {why}; write parallelize(model, mesh) in the task")


def _below(owner: str, name: str) -> str:
    return f"{owner}.{name}" if owner else name
