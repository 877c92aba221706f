"""A linear layer with thin products beside it (LoRA, as peft puts them there), cut as the layer itself is.

The answer is that of the layer plus, for each adapter, `lora_B(lora_A(x))`. Where the layer is cut by outputs, so is
lora_B, and every process has lora_A; where it is cut by inputs, so is lora_A, and every process has lora_B.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

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
