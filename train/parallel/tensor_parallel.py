"""Tensor parallelism: each layer is split over the processes of a tensor group.

The task's `parallelize` splits the model, or a plan found here does: pairs of linear layers of which the outputs of the
first are the inputs of the second. Pairs are found by the names that transformers give their layers. Names prove
nothing, so each kind of split module is run once whole and once split, on inputs of a real pass, and all its gradients
must agree.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from pipeline.contract.task import HasParallelize, Task
from pipeline.system.errors import ConfigError
from pipeline.system.torch_private import tree_leaves
from train.parallel.experts import all_reduce_backward, check_experts, find_experts, shard_experts
from train.parallel.pipeline_split import TemporaryWeights, units
from train.parallel.sequence_parallel import Pair, SequenceShards, sequence_problem

Run = Callable[[], Any]  # a forward pass of the whole model on a few samples
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def split_layers(
    model: nn.Module, task: Task, mesh: DeviceMesh, run: Run, weights: TemporaryWeights, by_sequence: bool = False
) -> list[str]:
    """Split the model in place; its outputs stay the same, and every process has its part of the layers.

    Return the parameters of which a process has the gradient of its part of the sequence.
    """
    model.eval()
    shards: SequenceShards | None = None
    if isinstance(task, HasParallelize):
        if by_sequence:
            raise ConfigError(sequence_problem("the model", "the task's parallelize() splits it, and can do this, too"))
        with torch.no_grad():
            with weights.during_forward(model):
                expected = _float_tensors(run())
            task.parallelize(model, mesh)
            with weights.during_forward(model):
                actual = _float_tensors(run())
            if not _agree(actual, expected):
                raise ConfigError("parallelize(): the model's outputs differ from those of the whole model")
    else:
        shards = _split_by_names(model, mesh, run, weights, by_sequence)
    if shards:
        _check_sequence(model, mesh, run, weights, shards)
    model.train()
    return shards.partial_gradients if shards else []


def _split_by_names(
    model: nn.Module, mesh: DeviceMesh, run: Run, weights: TemporaryWeights, by_sequence: bool
) -> SequenceShards | None:
    pairs = find_pairs(model, mesh.size())
    with _compared(model, [pair.owner for pair in pairs], run, weights, "tensor_parallel"):
        for pair in pairs:
            split_head_counts(model, pair, mesh.size())
        layers = [(name, True) for pair in pairs for name in pair.columns] + [(pair.row, False) for pair in pairs]
        styles: dict[str, ParallelStyle] = {}
        for name, by_outputs in layers:
            module = model.get_submodule(name)
            styles |= parallel_styles(name, module, by_outputs=by_outputs, partial_sums=by_sequence)
        parallelize_module(model, mesh, styles)
        row_layers = [name for name, style in styles.items() if isinstance(style, RowwiseParallel)]
        shards = SequenceShards(model, mesh, pairs, row_layers) if by_sequence else None
        for owner in {pair.owner: model.get_submodule(pair.owner) for pair in pairs}.values():
            if latent_column_layers(owner):
                sum_rotary_gradient(owner, mesh)
    return shards


def split_experts(model: nn.Module, mesh: DeviceMesh, run: Run, weights: TemporaryWeights) -> list[nn.Module]:
    """Split the experts of all layers over both axes of `mesh`, `expert` and `tensor`, checked like other layers."""
    layers = find_experts(model)
    check_experts(layers, mesh.size(0), mesh.size(1))
    model.eval()
    with _compared(model, list(layers), run, weights, "expert_parallel" if mesh.size(0) > 1 else "tensor_parallel"):
        for module in layers.values():
            shard_experts(module, mesh)
    model.train()
    return list(layers.values())


@contextlib.contextmanager
def _compared(
    model: nn.Module, owners: Sequence[str], run: Run, weights: TemporaryWeights, setting: str
) -> Iterator[None]:
    """Compare the modules that are split within the context with what they were before, one of each kind."""
    with weights.during_forward(model):
        arguments_by_module = dict(_record_arguments(model, owners, run))
    whole_modules = {name: copy.deepcopy(model.get_submodule(name)) for name in arguments_by_module}
    yield
    for name, arguments in arguments_by_module.items():
        split_module = model.get_submodule(name)
        with weights.of_module(split_module, name), weights.of_module(whole_modules[name], name):
            _compare(name, split_module, whole_modules[name], arguments, setting)


def _record_arguments(model: nn.Module, owners: Sequence[str], run: Run) -> Iterator[tuple[str, Arguments]]:
    """Yield the arguments of the first module of each kind: a class with parameters of the same shapes."""
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
    kinds = set()
    for owner in owners:
        kind = _module_kind(model.get_submodule(owner))
        if owner in calls and kind not in kinds:
            kinds.add(kind)
            yield owner, calls[owner]
    if missing := [owner for owner in owners if _module_kind(model.get_submodule(owner)) not in kinds]:
        raise ConfigError(_split_problem(missing[0], "the model does not call it, so the split cannot be checked"))


def _module_kind(module: nn.Module) -> tuple[Any, ...]:
    return (type(module), *((name, parameter.shape) for name, parameter in module.named_parameters()))


def _compare(name: str, split: nn.Module, whole: nn.Module, arguments: Arguments, setting: str) -> None:
    """Check that all gradients agree; then the outputs agree, and so does all between the split layers."""
    expected = _gradients(whole, arguments)
    try:
        actual = _gradients(split, arguments)
    except (RuntimeError, ValueError, AssertionError) as error:
        text = " ".join(str(error).split())[:200]
        reason = f"it does not run with a part of its heads or channels ({text})"
        raise ConfigError(_split_problem(name, reason, setting)) from error
    largest = max((float(gradient.abs().max()) for gradient in expected.values()), default=0.0)
    for parameter, gradient in expected.items():
        if not _agree([actual[parameter]], [gradient], noise=1e-5 * largest):
            reason = f"the gradient of its {parameter} differs from that of the whole module"
            raise ConfigError(_split_problem(name, reason, setting))


def _gradients(module: nn.Module, arguments: Arguments) -> Mapping[str, Tensor]:
    args, kwargs = copy.deepcopy(arguments)
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    results = _float_tensors(module(*args, **kwargs))
    if not parameters:  # frozen
        return {f"output {i}": result.detach() for i, result in enumerate(results)}
    outputs = [tensor for tensor in results if tensor.requires_grad]
    gradients = torch.autograd.grad(outputs, list(parameters.values()), _ramps(outputs), allow_unused=True)
    return {
        name: torch.zeros_like(parameter) if gradient is None else _full_tensor(gradient)
        for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True)
    }


def _ramps(outputs: list[Tensor]) -> list[Tensor]:
    """Return gradients of the outputs, another number for each entry."""
    return [torch.arange(float(t.numel()), device=t.device).sin().view_as(t).to(t) for t in outputs]


def _check_sequence(
    model: nn.Module, mesh: DeviceMesh, run: Run, weights: TemporaryWeights, shards: SequenceShards
) -> None:
    """Enable sequence parallelism, and check that the outputs and all gradients of the whole model stay the same."""
    expected = _sample_gradients(model, run, weights)
    shards.enabled = True
    try:
        actual = _sample_gradients(model, run, weights)
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
        text = " ".join(str(error).split())[:200]
        raise ConfigError(sequence_problem(shards.site, f"the model does not run ({text})")) from error
    for name in filter(actual.__contains__, shards.partial_gradients):
        dist.all_reduce(actual[name], group=mesh.get_group())
    largest = max(float(sample.abs().max()) for sample in expected.values())
    for name, sample in expected.items():
        if name not in actual or not _agree([actual[name]], [sample], noise=1e-5 * largest):
            raise ConfigError(sequence_problem(name, "it or its gradient differs from that of the whole sequence"))


_SAMPLE_SIZE = 4096  # entries of a gradient; a wrong one is wrong almost everywhere


def _sample_gradients(model: nn.Module, run: Run, weights: TemporaryWeights) -> dict[str, Tensor]:
    """Return the outputs and some entries of each gradient, which is freed at once."""
    samples: dict[str, Tensor] = {}
    hooks: dict[Tensor, Any] = {}

    def keep(name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient, parameter.grad = _full_tensor(parameter.grad).flatten(), None
        samples[name] = gradient[:: len(gradient) // _SAMPLE_SIZE + 1].clone()

    def watch(prefix: str, module: nn.Module, _: Any) -> None:
        for name, parameter in module.named_parameters(prefix):
            if parameter.requires_grad and not parameter.is_meta and parameter not in hooks:
                register: Any = parameter.register_post_accumulate_grad_hook  # published without types
                hooks[parameter] = register(partial(keep, name))

    with weights.during_forward(model):
        named_modules = [("", model), *((unit.name, unit.module) for unit in units(model))]
        watches = [module.register_forward_pre_hook(partial(watch, name)) for name, module in named_modules]
        outputs = _float_tensors(run())
        trained = [output for output in outputs if output.requires_grad]
        torch.autograd.backward(trained, _ramps(trained))
    for handle in (*hooks.values(), *watches):
        handle.remove()
    return {**{f"output {i}": output.detach() for i, output in enumerate(outputs)}, **samples}


def _agree(actual: list[Tensor], expected: list[Tensor], noise: float = 0.0) -> bool:
    """Compare up to rounding: a wrong split is off by as much as the values themselves."""
    pairs = zip(actual, expected, strict=True)
    return all(bool((_full_tensor(a) - b).abs().max() <= 0.01 * b.abs().max() + noise) for a, b in pairs)


def _full_tensor(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _float_tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _split_problem(name: str, reason: str, setting: str = "tensor_parallel") -> str:
    instead = (
        "use train.expert_parallel=1" if setting == "expert_parallel" else "write parallelize(model, mesh) in the task"
    )
    return f"train.{setting}: {name or 'the model'} cannot be split: {reason}; {instead}"


# Names of layers below the module that owns them: those split by outputs, then the one split by inputs. Entries with
# more layers come first: w1 and w3 belong to one pair where both exist.
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
_FUSED_LAYERS = {"c_attn", "qkv", "qkv_proj", "to_qkv", "Wqkv", "wqkv", "query_key_value", "in_proj", "gate_up_proj"}
_HEAD_ATTRIBUTES = {
    *("heads", "n_heads", "num_heads", "n_head", "nhead", "num_attention_heads", "n_local_heads"),
    *("kv_heads", "n_kv_heads", "num_kv_heads", "n_kv_head", "num_key_value_heads", "n_local_kv_heads"),
}
_ELEMENTWISE = (
    *(nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Softplus, nn.Mish, nn.Hardswish),
    *(nn.Dropout, nn.Identity),
)


def find_pairs(model: nn.Module, size: int) -> list[Pair]:
    """Return all pairs, no layer in two of them; refuse what looks like a pair and cannot be split."""
    _refuse_fused(model)
    pairs: list[Pair] = []
    used_layers: set[str] = set()
    for pair in _candidate_pairs(model):
        layers = {*pair.columns, pair.row}
        if not layers & used_layers:
            _check_pair(model, pair, size)
            used_layers |= layers
            pairs.append(pair)
    if not pairs:
        raise ConfigError(
            f"train.tensor_parallel={size}: the model has no pair of linear layers with names of a transformer, and no "
            "sequence of Linear, activation, Linear; write parallelize(model, mesh) in the task"
        )
    return pairs


def split_head_counts(model: nn.Module, pair: Pair, size: int) -> None:
    """Set the attributes that count heads to this process's part of them."""
    if pair.attention:
        holder = model.get_submodule(pair.columns[0].rpartition(".")[0])
        for name, count in _head_counts(holder).items():
            setattr(holder, name, count // size)


def _candidate_pairs(model: nn.Module) -> Iterator[Pair]:
    for owner, module in model.named_modules():
        if latent := _latent_layers(module):
            columns = tuple(_join(owner, name) for name in latent)
            yield Pair(owner, columns, _join(owner, "o_proj"), attention=True)
        for families, attention in ((_ATTENTION, True), (_MLP, False)):
            for columns, rows in families:
                for row in rows:
                    if _is_pair(module, columns, row):
                        yield Pair(owner, tuple(_join(owner, name) for name in columns), _join(owner, row), attention)
        if isinstance(module, nn.Sequential):
            yield from _sequential_pairs(owner, module)


def _latent_layers(module: nn.Module) -> tuple[str, ...]:
    names = latent_column_layers(module)
    return names if all(_find_linear(module, name) is not None for name in (*names, "o_proj")) else ()


def _is_pair(module: nn.Module, columns: tuple[str, ...], row: str) -> bool:
    layers = [_find_linear(module, name) for name in (*columns, row)]
    linear = [layer for layer in layers if layer is not None]
    return len(linear) == len(layers) and linear[0].out_features == linear[-1].in_features


def _find_linear(module: nn.Module, path: str) -> nn.Linear | None:
    for name in path.split("."):
        child = getattr(module, name, None)
        if not isinstance(child, nn.Module):
            return None
        module = child
    return base_linear(module)


def _sequential_pairs(owner: str, row: nn.Sequential) -> Iterator[Pair]:
    """Yield pairs Linear, element-wise modules, Linear."""
    modules = list(row.named_children())
    linear = [index for index, (_, module) in enumerate(modules) if isinstance(module, nn.Linear)]
    for start, stop in itertools.pairwise(linear):
        if all(isinstance(module, _ELEMENTWISE) for _, module in modules[start + 1 : stop]):
            first, second = (_join(owner, modules[index][0]) for index in (start, stop))
            yield Pair(owner, (first,), second, attention=False)


def _check_pair(model: nn.Module, pair: Pair, size: int) -> None:
    holder = pair.columns[0].rpartition(".")[0]
    for name, count in _head_counts(model.get_submodule(holder)).items():
        if pair.attention and count % size:
            _refuse(holder, f"{size} processes cannot share its {count} heads ({name})")
    width = getattr(model.get_submodule(holder), "head_dim", None) if pair.attention else None
    for name in pair.columns:
        layer = _find_linear(model, name)
        if layer and isinstance(width, int) and layer.out_features // width % size:
            _refuse(name, f"{size} processes cannot share its {layer.out_features // width} heads")
        if layer and layer.out_features % size:
            _refuse(name, f"{size} processes cannot share its {layer.out_features} outputs")


def _head_counts(holder: nn.Module) -> dict[str, int]:
    return {name: value for name, value in vars(holder).items() if name in _HEAD_ATTRIBUTES and isinstance(value, int)}


def _refuse_fused(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            _refuse(name, "nn.MultiheadAttention has queries, keys and values in one matrix")
        if name.rpartition(".")[2] in _FUSED_LAYERS and any(True for _ in module.parameters()):
            _refuse(name, "it has several matrices in one")


def _refuse(name: str, reason: str) -> None:
    raise ConfigError(_split_problem(name, reason))


def _join(owner: str, name: str) -> str:
    return f"{owner}.{name}" if owner else name


_LORA_MATRICES = ("lora_A", "lora_B")


def base_linear(module: nn.Module) -> nn.Linear | None:
    """Return the linear layer in a module, itself or inside a LoRA adapter; None if it cannot be split."""
    if isinstance(module, nn.Linear):
        return module
    base = getattr(module, "base_layer", None)
    return base if isinstance(base, nn.Linear) and _is_plain_lora(module) else None


def parallel_styles(
    name: str, module: nn.Module, *, by_outputs: bool, partial_sums: bool = False
) -> dict[str, ParallelStyle]:
    """Return torch's style for each part of the layer `name`.

    With LoRA the output is that of the layer plus `lora_B(lora_A(x))` for each adapter. Where a layer is split by
    outputs, so is lora_B, and every process has lora_A; where it is split by inputs, so is lora_A. With `partial_sums`
    the outputs of the latter are not added up yet.
    """
    summed: dict[str, Any] = {"output_layouts": Partial(), "use_local_output": False} if partial_sums else {}
    style, lora_matrix = (ColwiseParallel, "lora_B") if by_outputs else (partial(RowwiseParallel, **summed), "lora_A")
    if isinstance(module, nn.Linear):
        return {name: style()}
    adapters = module.get_submodule(lora_matrix)
    return {
        f"{name}.base_layer": style(),
        **{f"{name}.{lora_matrix}.{adapter}": style() for adapter, _ in adapters.named_children()},
    }


def _is_plain_lora(module: nn.Module) -> bool:
    """Return whether a module is a LoRA adapter without biases; others (DoRA's magnitudes) need the whole layer."""
    adapters = {name: child for name, child in module.named_children() if name != "base_layer"}
    other_modules = [child for name, child in adapters.items() if name not in _LORA_MATRICES]
    if not set(_LORA_MATRICES) <= adapters.keys() or any(True for child in other_modules for _ in child.parameters()):
        return False
    matrices = [child for name in _LORA_MATRICES for child in adapters[name].children()]
    return bool(matrices) and all(isinstance(matrix, nn.Linear) and matrix.bias is None for matrix in matrices)


_LATENT = "kv_a_proj_with_mqa"  # computes the latent of keys and values, and the keys' rotary part


def latent_column_layers(module: nn.Module) -> tuple[str, ...]:
    """Return the layers that compute heads from latents; none if the module is no multi-head latent attention."""
    names = {name for name, child in module.named_children() if child is not None}
    if not {_LATENT, "kv_b_proj", "o_proj"} <= names or not isinstance(getattr(module, "kv_lora_rank", None), int):
        return ()
    return ("q_b_proj" if "q_b_proj" in names else "q_proj", "kv_b_proj")


def sum_rotary_gradient(module: nn.Module, mesh: DeviceMesh) -> None:
    """Add up the gradient of the keys' rotary part, which all heads use without passing through a split layer.

    The gradient of the latent itself is added up where it enters kv_b_proj.
    """
    rank, group = int(module.kv_lora_rank), mesh.get_group()  # type: ignore[arg-type]

    def hook(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        latent, rotary = output[..., :rank], output[..., rank:]
        return torch.cat([latent, all_reduce_backward(rotary, group)], dim=-1)

    module.get_submodule(_LATENT).register_forward_hook(hook)
