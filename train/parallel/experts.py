"""Expert parallel: each process holds some experts of every layer, and tokens travel to their experts and back.

The processes of `expert` have different tokens, those of `tensor` the same. So a token goes over the axis `expert` to
the owners of its experts, but only from the one of its `tensor` processes that is in the owner's place there: nothing
is sent or computed twice, and the sum over `tensor` puts a token's answers together.

Exchanges in the midst of a model, with the exchange its gradients need on the way back.

A linear layer with thin products beside it (LoRA, as peft puts them there), cut as the layer itself is.

The answer is that of the layer plus, for each adapter, `lora_B(lora_A(x))`. Where the layer is cut by outputs, so is
lora_B, and every process has lora_A; where it is cut by inputs, so is lora_A, and every process has lora_B.

Multi-head latent attention in parts: each process computes its heads from latents that all have.
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
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from pipeline.contract.errors import ConfigError

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


def hand_round(rows: Tensor, send: Sequence[int], take: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Rows in the order of their takers, `send[i]` of them for process i; returned in the order of their givers."""
    found: Tensor = _HandRound.apply(rows, list(send), list(take), group)  # type: ignore[no-untyped-call]
    return found


def meet_backward(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The same tensor, of which each process uses a part: its gradient is the sum over all parts."""
    found: Tensor = _MeetBackward.apply(tensor, group)  # type: ignore[no-untyped-call]
    return found


def add_up(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the processes, which all go on with in the same way: each part's gradient is that of the sum."""
    found: Tensor = _AddUp.apply(tensor, group)  # type: ignore[no-untyped-call]
    return found


def divide_backward(tensor: Tensor, divisor: int) -> Tensor:
    """The same tensor, with an nth of its gradient."""
    found: Tensor = _DivideBackward.apply(tensor, divisor)  # type: ignore[no-untyped-call]
    return found


class _HandRound(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], take: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.way_back = take, send, group
        return _exchange(rows, send, take, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _exchange(gradients[0], *ctx.way_back), None, None, None


def _exchange(rows: Tensor, send: list[int], take: list[int], group: dist.ProcessGroup) -> Tensor:
    found = rows.new_empty((sum(take), *rows.shape[1:]))
    dist.all_to_all_single(found, rows.contiguous(), take, send, group=group)
    return found


class _MeetBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _summed(gradients[0], ctx.group), None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:  # noqa: ARG004
        return _summed(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: ARG004
        return gradients[0], None


def _summed(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class _DivideBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, divisor: int) -> Tensor:
        ctx.divisor = divisor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] / ctx.divisor, None


_THIN = ("lora_A", "lora_B")


def linear_in(module: nn.Module) -> nn.Linear | None:
    """The layer itself; nothing where the module is none, or is adapted in a way that cannot be cut so."""
    if isinstance(module, nn.Linear):
        return module
    base = module._modules.get("base_layer")
    return base if isinstance(base, nn.Linear) and _known(module) else None


def styles(name: str, module: nn.Module, *, by_outputs: bool) -> dict[str, ParallelStyle]:
    """How each part of the layer `name` is cut."""
    style, thin = (ColwiseParallel, "lora_B") if by_outputs else (RowwiseParallel, "lora_A")
    if isinstance(module, nn.Linear):
        return {name: style()}
    adapters = module.get_submodule(thin)
    return {f"{name}.base_layer": style(), **{f"{name}.{thin}.{one}": style() for one, _ in adapters.named_children()}}


def _known(module: nn.Module) -> bool:
    """Nothing but thin matrices without a bias: other adapters (DoRA's magnitudes) look at the whole layer."""
    beside = {name: child for name, child in module.named_children() if name != "base_layer"}
    others = [child for name, child in beside.items() if name not in _THIN]
    if not set(_THIN) <= beside.keys() or any(True for child in others for _ in child.parameters()):
        return False
    matrices = [child for name in _THIN for child in beside[name].children()]
    return bool(matrices) and all(isinstance(one, nn.Linear) and one.bias is None for one in matrices)


_LATENT = "kv_a_proj_with_mqa"  # makes the compressed latent of keys and values, and the keys' rotary part


def cut_by_outputs(module: nn.Module) -> tuple[str, ...]:
    """The layers that make heads out of latents; nothing where the module is no such attention."""
    names = {name for name, child in module.named_children() if child is not None}
    if not {_LATENT, "kv_b_proj", "o_proj"} <= names or not isinstance(getattr(module, "kv_lora_rank", None), int):
        return ()
    return ("q_b_proj" if "q_b_proj" in names else "q_proj", "kv_b_proj")


def join_rotary(module: nn.Module, mesh: DeviceMesh) -> None:
    """The keys' rotary part goes to all heads past every layer that is cut: its gradient is the sum over all parts.

    That of the latent itself is summed where it enters kv_b_proj.
    """
    rank, group = int(module.kv_lora_rank), mesh.get_group()  # type: ignore[arg-type]

    def hook(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        latent, rotary = output[..., :rank], output[..., rank:]
        return torch.cat([latent, meet_backward(rotary, group)], dim=-1)

    module.get_submodule(_LATENT).register_forward_hook(hook)
