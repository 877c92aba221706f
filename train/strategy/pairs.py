"""Pairs of linear layers that can be cut together: the outputs of the first are the inputs of the second."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from pipeline.spec.errors import ConfigError
from train.families.adapted import linear_in
from train.families.latent import cut_by_outputs

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
