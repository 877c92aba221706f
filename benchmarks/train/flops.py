"""What a token's way through a model takes in floating point operations, and what a device can do of them."""

from __future__ import annotations

from torch import nn

# Dense bf16 in TFLOP/s, from the makers' data sheets; the longest name that fits counts.
PEAKS = {"A100": 312, "H100": 989, "H100 PCIe": 756, "H200": 989, "B200": 2250, "L4": 121, "L40S": 362, "A10": 125}


def peak_flops(device: str) -> float | None:
    known = [name for name in PEAKS if set(name.split()) <= set(device.replace("-", " ").split())]
    return PEAKS[max(known, key=len)] * 1e12 if known else None


def flops_per_token(parameters: int, layers: int, width: int, length: int) -> float:
    """Six for each parameter, forward and backward, and what attention does between the tokens of a row.

    `width`: of queries and values, all heads together, at the mean.
    """
    return 6 * parameters + 12 * layers * width * length


def active_parameters(model: nn.Module, active_experts: int = 0) -> int:
    """Those a token is multiplied with: of each mixture so many experts, and no table that it is only looked up in."""
    found = sum(parameter.numel() for parameter in model.parameters())
    for module in model.modules():
        experts = getattr(module, "num_experts", None)
        own = [one for one in module.parameters(recurse=False) if one.ndim == 3 and len(one) == experts]
        found -= sum(one.numel() // len(one) * (len(one) - active_experts) for one in own)
    return found - _looked_up(model)


def _looked_up(model: nn.Module) -> int:
    """Embeddings that are not the head as well: a shared one is counted as the head."""
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    head = getattr(model, "lm_head", None)
    return sum(table.numel() for table in tables if isinstance(head, nn.Linear) and table is not head.weight)
