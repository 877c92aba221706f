"""Expert parallelism: each process has some experts of every layer, and tokens travel to their experts and back.

The processes of the mesh axis `expert` have different tokens, those of `tensor` the same. So a token is sent over
`expert` to the owners of its experts, but only by the one of its `tensor` processes whose place matches the owner's:
nothing is sent or computed twice, and a sum over `tensor` combines a token's outputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from pipeline.system.errors import ConfigError
from train.state import local_shard

_eager: Callable[..., Any] = torch.compiler.disable  # it has no types; token counts differ at each step
_ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")  # of forward(), as transformers name them


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that have all experts of a layer as rows of their parameters and take the routing as input."""
    return {name: module for name, module in model.named_modules() if _has_experts(module)}


def check_experts(layers: dict[str, nn.Module], expert: int, tensor: int) -> None:
    """Refuse numbers of experts that the processes cannot share."""
    if expert > 1 and not layers:
        raise ConfigError(
            f"train.expert_parallel={expert}: the model has no layer of experts like those of transformers' mixture "
            "models; use train.expert_parallel=1"
        )
    for name, module in layers.items():
        count = expert_count(module)
        if count % (expert * tensor):
            sizes = (("expert_parallel", expert), ("tensor_parallel", tensor))
            settings = " x ".join(f"train.{name}={size}" for name, size in sizes if size > 1)
            raise ConfigError(
                f"{settings}: {expert * tensor} processes cannot share the {count} experts of {name}; "
                f"use numbers whose product divides {count}"
            )


def shard_experts(module: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the module's parameters in place over both axes of `mesh`, `expert` and `tensor`."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        sharded = distribute_tensor(parameter.data, mesh, [Shard(0), Shard(0)], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))
    module.forward = _eager(_Dispatch(module, mesh))


def expert_count(module: nn.Module) -> int:
    return int(module.num_experts)  # type: ignore[arg-type]


class _Dispatch:
    """Replaces the module's forward(): the same outputs for this process's tokens, computed by all processes."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        self._module, self._type = module, type(module)  # fully_shard changes the class
        self._groups = mesh.get_group("expert"), mesh.get_group("tensor")
        self._expert, self._tensor = mesh.size(0), mesh.size(1)
        self._tensor_rank = mesh.get_local_rank("tensor")
        self._experts_here = expert_count(module) // (self._expert * self._tensor)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        expert_group, tensor_group = self._groups
        if self._tensor > 1:
            hidden_states = all_reduce_backward(hidden_states, tensor_group)
            top_k_weights = all_reduce_backward(top_k_weights, tensor_group)
        sent_counts, order = self._select(top_k_index)
        received_counts = torch.empty_like(sent_counts)  # by sender and expert of this process
        dist.all_to_all_single(received_counts, sent_counts, group=expert_group)
        send, receive = sent_counts.sum(1).tolist(), received_counts.sum(1).tolist()
        tokens = hidden_states[order // top_k_index.shape[1]]
        received = all_to_all_rows(tokens, send, receive, expert_group)
        outputs = all_to_all_rows(self._run_experts(received, received_counts), receive, send, expert_group)
        weighted = outputs * top_k_weights.reshape(-1, 1)[order]
        rows = weighted.new_zeros(top_k_index.numel(), hidden_states.shape[1]).index_copy(0, order, weighted)
        combined = rows.view(*top_k_index.shape, -1).sum(1).to(hidden_states.dtype)
        if self._tensor > 1:  # all use the sum in the same way, so a summand has its gradient: autograd needs no part
            dist.all_reduce(combined.detach(), group=tensor_group)
        return combined

    def _select(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return which choices this process sends: counts by receiver and its expert, and positions in that order."""
        flat = chosen.reshape(-1)
        order = torch.argsort(flat, stable=True)
        order = order[flat[order] // self._experts_here % self._tensor == self._tensor_rank]
        all_experts = torch.arange(self._experts_here * self._expert * self._tensor, device=flat.device)
        counts = (flat[:, None] == all_experts).sum(0).view(self._expert, self._tensor, self._experts_here)
        return counts[:, self._tensor_rank].contiguous(), order

    def _run_experts(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Return the outputs of this process's experts for the received tokens, in the same order."""
        weights = {name: self._local_rows(p) for name, p in self._module.named_parameters(recurse=False)}
        if not len(tokens):  # the others still wait for this process's gradients
            return tokens + sum(weight.sum() for weight in weights.values()) * 0
        local_module = object.__new__(self._type)  # the module with the experts of this process alone
        attributes = {
            name: value for name, value in self._module.__dict__.items() if name not in ("forward", "_parameters")
        }
        local_module.__dict__ = {**attributes, "_parameters": {}, **weights, "num_experts": self._experts_here}
        experts = torch.arange(self._experts_here, device=tokens.device).repeat(self._expert)
        expert_indices = experts.repeat_interleave(counts.flatten())
        ones = tokens.new_ones(len(tokens), 1)
        result: Tensor = self._type.forward(local_module, tokens, expert_indices[:, None], ones)
        return result

    def _local_rows(self, parameter: nn.Parameter) -> Tensor:
        """Return the rows of this process.

        Their gradient is divided, since it already has the tokens of all `expert` processes, and is averaged later.
        """
        rows = local_shard(parameter)
        rows = rows.view_as(rows)  # or the parameter might get a hook at each step
        if rows.requires_grad:
            rows.register_hook(lambda gradient: gradient / self._expert)  # type: ignore[no-untyped-call]
        return rows


def _has_experts(module: nn.Module) -> bool:
    count = getattr(module, "num_experts", None)
    parameters = list(module.parameters(recurse=False))
    if not isinstance(count, int) or not parameters or any(p.ndim < 2 or len(p) != count for p in parameters):
        return False
    if any(isinstance(parameter, DTensor) for parameter in parameters):  # split by the task
        return False
    return tuple(inspect.signature(type(module).forward).parameters)[1:] == _ARGUMENTS


def all_to_all_rows(rows: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Send `send[i]` rows to process i and receive `receive[i]` rows from it, in the order of the processes."""
    result: Tensor = _AllToAllRows.apply(rows, list(send), list(receive), group)  # type: ignore[no-untyped-call]
    return result


def all_reduce_backward(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensor, of which each process uses a part: its gradient is the sum over the processes."""
    result: Tensor = _AllReduceBackward.apply(tensor, group)  # type: ignore[no-untyped-call]
    return result


class _AllToAllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.reverse = receive, send, group
        return _exchange(rows, send, receive, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _exchange(gradients[0], *ctx.reverse), None, None, None


def _exchange(rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    received = rows.new_empty((sum(receive), *rows.shape[1:]))
    dist.all_to_all_single(received, rows.contiguous(), receive, send, group=group)
    return received


class _AllReduceBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None
