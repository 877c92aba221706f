"""Sequence parallelism: between the layers that tensor parallelism splits, each process has a part of the sequence.

Norms, dropout and residual additions of the repeated blocks work on this part only. A module whose layers are split by
outputs gathers the sequence, and the layer split by inputs reduces its output to parts again. torch's
PrepareModuleInput cannot gather parts of different lengths, so there are hooks here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from pipeline.system.errors import ConfigError
from train.optim import seed_torch, seed_value
from train.parallel.experts import find_experts
from train.parallel.pipeline_split import units


class Pair(NamedTuple):
    """Linear layers of which the outputs of the first are the inputs of the last."""

    owner: str  # the module that calls them
    columns: tuple[str, ...]  # split by outputs
    row: str  # split by inputs
    attention: bool


class SequenceShards:
    """Hooks that give each process its part of the hidden states in the repeated blocks, once they are `enabled`.

    Before, the model is split by layers only. `row_layers` are those split by inputs, which return partial sums.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, pairs: list[Pair], row_layers: list[str]) -> None:
        self.enabled, self.site = False, ""  # the module whose hook ran last
        self._model, self._mesh = model, mesh
        self._lengths: dict[str, int] = {}  # of the whole sequence, by the start of the blocks' names
        blocks = [unit.name for unit in units(model) if unit.repeated]
        mixtures = [path for name in find_experts(model) if _is_in(path := _parent(name), blocks)]
        pairs = [pair for pair in pairs if _is_in(pair.owner, blocks) and not _is_in(pair.owner, mixtures)]
        blocks = [block for block in blocks if any(_is_in(pair.owner, [block]) for pair in pairs)]
        if not blocks:
            raise ConfigError(sequence_problem("the model", "it has no repeated blocks with split layers"))
        # Of several layers the parent gathers, once for all.
        gathering = {p.columns[0] if len(p.columns) == 1 else _parent(p.columns[0]) for p in pairs}
        rows = [pair.row for pair in pairs]
        self.partial_gradients = [  # parameters that each process uses for its part of the sequence only
            name
            for name, parameter in model.named_parameters()
            if _is_in(name, rows) or (_is_in(name, blocks) and not _is_in(name, [*gathering, *mixtures]))
            if not isinstance(parameter, DTensor)
        ]
        for name in gathering:
            parameters = model.get_submodule(name).parameters()
            # As a distributed tensor it adds up the gradients of all its layers at once.
            keep = all(isinstance(parameter, DTensor) for parameter in parameters)
            self._before(name, partial(self._gather, keep=keep))
        for name in mixtures:  # each process routes all tokens
            self._before(name, self._gather)
            self._after(name, self._split, own=True)
        for name in row_layers:
            hook = partial(self._reduce, name, _is_in(name, rows))
            model.get_submodule(name).register_forward_hook(hook)
        first = {_parent(block): block for block in reversed(blocks)}  # of each list of blocks
        last = {_parent(block): block for block in blocks}
        for stack in first:
            self._before(first[stack], self._enter, own=True)
            self._after(last[stack], lambda hidden: self._gather(hidden).clone())  # FSDP warns of views

    def _before(self, name: str, change: Callable[[Tensor], Tensor], own: bool = False) -> None:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if not self.enabled:
                return None
            self._begin(module, name, own)
            if args:
                return (change(args[0]), *args[1:]), kwargs
            key = next(iter(kwargs))
            return args, {**kwargs, key: change(kwargs[key])}

        self._model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True, prepend=True)

    def _after(self, name: str, change: Callable[[Tensor], Tensor], own: bool = False) -> None:
        def hook(module: nn.Module, _: Any, output: Any) -> Any:
            if not self.enabled:
                return None
            self._begin(module, f"{name} output", own)
            return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

        self._model.get_submodule(name).register_forward_hook(hook)

    def _begin(self, module: nn.Module, site: str, own: bool) -> None:
        """Draw other random numbers for each part of the sequence, and the same for what all processes compute.

        So no mask of dropout is that of one process, as in all split layers. A seed depends on the one before it, which
        activation checkpointing restores.
        """
        self.site = site
        if module.training:
            last = torch.initial_seed()
            common = seed_value(last >> 32 or last, site) | 1  # in the upper half, which the CPU's generator ignores
            seed_torch(common << 32 | seed_value(common, self._mesh.get_local_rank() if own else "all"))

    def _enter(self, hidden: Tensor) -> Tensor:
        self._lengths[self.site[: self.site.rfind(".") + 1]] = hidden.shape[1]
        return self._split(hidden)

    def _split(self, hidden: Tensor) -> Tensor:
        whole = DTensor.from_local(hidden, self._mesh, [Replicate()])
        return whole.redistribute(placements=[Shard(1)]).to_local()

    def _gather(self, hidden: Tensor, keep: bool = False) -> Tensor:
        """Return the hidden states of the whole sequence; `keep`: as a distributed tensor."""
        length = next(length for start, length in self._lengths.items() if self.site.startswith(start))
        most = -(-length // self._mesh.size())
        expected = min(most, max(0, length - self._mesh.get_local_rank() * most))
        if hidden.ndim < 2 or hidden.shape[1] != expected:
            problem = f"it gets {list(hidden.shape)} and not {expected} positions"
            raise ConfigError(sequence_problem(self.site, problem))
        shape = torch.Size((len(hidden), length, *hidden.shape[2:]))
        stride = torch.empty(shape, device="meta").stride()
        part = DTensor.from_local(hidden.contiguous(), self._mesh, [Shard(1)], shape=shape, stride=stride)
        whole = part.redistribute(placements=[Replicate()])
        return whole if keep else whole.to_local()

    def _reduce(self, name: str, to_parts: bool, module: nn.Module, _: Any, output: DTensor) -> Tensor:
        if to_parts and self.enabled:
            self._begin(module, name, own=True)
            return output.redistribute(placements=[Shard(1)]).to_local()
        return output.redistribute(placements=[Replicate()]).to_local()


def sequence_problem(name: str, reason: str) -> str:
    return f"train.sequence_parallel: {name} cannot have parts of the sequence: {reason}; use sequence_parallel=false"


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _is_in(name: str, modules: Iterable[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)
