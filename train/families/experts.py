"""Expert parallel: each process holds some experts of every layer, and tokens travel to their experts and back.

The processes of `expert` have different tokens, those of `tensor` the same. So a token goes over the axis `expert` to
the owners of its experts, but only from the one of its `tensor` processes that is in the owner's place there: nothing
is sent or computed twice, and the sum over `tensor` puts a token's answers together.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from pipeline.spec.errors import ConfigError
from train.families.exchange import add_up, divide_backward, hand_round, meet_backward

_eager: Callable[..., Any] = torch.compiler.disable  # published without types; numbers of tokens differ at each step
_ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")  # of forward(), as transformers name them


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that hold all experts of a layer as rows of its parameters, and are told which tokens go where."""
    return {name: module for name, module in model.named_modules() if _holds_experts(module)}


def check_experts(layers: dict[str, nn.Module], expert: int, tensor: int) -> None:
    """Before anything is cut."""
    if expert > 1 and not layers:
        raise ConfigError(
            f"train.expert={expert}: the model has no layer of experts as transformers' models of a mixture have; "
            "use train.expert=1"
        )
    for name, module in layers.items():
        count = number_of_experts(module)
        if count % (expert * tensor):
            words = " x ".join(
                f"train.{word}={size}" for word, size in (("expert", expert), ("tensor", tensor)) if size > 1
            )
            raise ConfigError(
                f"{words}: {expert * tensor} processes cannot share the {count} experts of {name}; "
                f"use numbers whose product divides {count}"
            )


def cut_experts(module: nn.Module, mesh: DeviceMesh) -> None:
    """In place. Its parameters are cut over both axes of `mesh`, `expert` and `tensor`."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        cut = distribute_tensor(parameter.data, mesh, [Shard(0), Shard(0)], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(cut, requires_grad=parameter.requires_grad))
    module.forward = _eager(_Dispatch(module, mesh))


def number_of_experts(module: nn.Module) -> int:
    return int(module.num_experts)  # type: ignore[arg-type]


class _Dispatch:
    """Stands for the module's forward(): the same answer for this process's tokens, worked out by all."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        self._module, self._kind = module, type(module)  # fully_shard gives it another class
        self._groups = mesh.get_group("expert"), mesh.get_group("tensor")
        self._expert, self._tensor = mesh.size(0), mesh.size(1)
        self._place = mesh.get_local_rank("tensor")
        self._each = number_of_experts(module) // (self._expert * self._tensor)  # experts of one process

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        among_experts, alike = self._groups
        if self._tensor > 1:
            hidden_states = meet_backward(hidden_states, alike)
            top_k_weights = meet_backward(top_k_weights, alike)
        sent, order = self._mine(top_k_index)
        taken = torch.empty_like(sent)
        dist.all_to_all_single(taken, sent, group=among_experts)  # of each giver, how many for each expert here
        give, take = sent.sum(1).tolist(), taken.sum(1).tolist()
        tokens = hidden_states[order // top_k_index.shape[1]]
        answers = hand_round(
            self._work(hand_round(tokens, give, take, among_experts), taken), take, give, among_experts
        )
        weighted = answers * top_k_weights.reshape(-1, 1)[order]
        rows = weighted.new_zeros(top_k_index.numel(), hidden_states.shape[1]).index_copy(0, order, weighted)
        found = rows.view(*top_k_index.shape, -1).sum(1).to(hidden_states.dtype)
        return add_up(found, alike) if self._tensor > 1 else found

    def _mine(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Of the choices that this process sends: their number by taker and its expert, and their places in order."""
        flat = chosen.reshape(-1)
        order = torch.argsort(flat, stable=True)
        order = order[flat[order] // self._each % self._tensor == self._place]
        every = torch.arange(self._each * self._expert * self._tensor, device=flat.device)
        counts = (flat[:, None] == every).sum(0).view(self._expert, self._tensor, self._each)
        return counts[:, self._place].contiguous(), order

    def _work(self, tokens: Tensor, taken: Tensor) -> Tensor:
        """What the experts here answer to the tokens that came, in the same order."""
        weights = {name: self._held(parameter) for name, parameter in self._module.named_parameters(recurse=False)}
        if not len(tokens):  # the others wait for this process's gradients all the same
            return tokens + sum(weight.sum() for weight in weights.values()) * 0
        part = object.__new__(self._kind)
        own = {name: value for name, value in self._module.__dict__.items() if name not in ("forward", "_parameters")}
        part.__dict__ = {**own, "_parameters": {}, **weights, "num_experts": self._each}
        experts = torch.arange(self._each, device=tokens.device).repeat(self._expert)
        chosen = experts.repeat_interleave(taken.flatten())
        once = tokens.new_ones(len(tokens), 1)
        found: Tensor = self._kind.forward(part, tokens, chosen[:, None], once)
        return found

    def _held(self, parameter: nn.Parameter) -> Tensor:
        """Gradients are averaged over copies of the model, and those of all `expert` processes are in this one."""
        held = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        return divide_backward(held, self._expert)


def _holds_experts(module: nn.Module) -> bool:
    count = getattr(module, "num_experts", None)
    parameters = list(module.parameters(recurse=False))
    if not isinstance(count, int) or not parameters or any(p.ndim < 2 or len(p) != count for p in parameters):
        return False
    if any(isinstance(parameter, DTensor) for parameter in parameters):  # by the task
        return False
    return tuple(inspect.signature(type(module).forward).parameters)[1:] == _ARGUMENTS
