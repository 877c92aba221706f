"""Multi-head latent attention in parts: each process computes its heads from latents that all have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from train.families.exchange import meet_backward

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
