"""What a token's way through a model takes in floating point operations, and what a device can do of them."""

from __future__ import annotations

from torch import nn

# Dense bf16 in TFLOP/s, from the makers' data sheets; the longest name that fits counts.
PEAKS = {"A100": 312, "H100": 989, "H100 PCIe": 756, "H200": 989, "B200": 2250, "L4": 121, "L40S": 362, "A10": 125}


def peak_flops(device: str) -> float | None:
    matches = [name for name in PEAKS if set(name.split()) <= set(device.replace("-", " ").split())]
    return PEAKS[max(matches, key=len)] * 1e12 if matches else None


def flops_per_token(parameters: int, layers: int, width: int, length: int) -> float:
    """Return 6 FLOPs per parameter, forward and backward, plus those of attention between the tokens of a row.

    `width`: of queries and values, all heads together, at the mean.
    """
    return 6 * parameters + 12 * layers * width * length


def active_parameters(model: nn.Module, active_experts: int = 0) -> int:
    """Count the parameters that a token is multiplied with: the active experts, and no embedding tables."""
    count = sum(parameter.numel() for parameter in model.parameters())
    for module in model.modules():
        experts = getattr(module, "num_experts", None)
        expert_weights = [
            weight for weight in module.parameters(recurse=False) if weight.ndim == 3 and len(weight) == experts
        ]
        count -= sum(weight.numel() // len(weight) * (len(weight) - active_experts) for weight in expert_weights)
    return count - _embedding_weights(model)


def _embedding_weights(model: nn.Module) -> int:
    """Count the embeddings that are not tied to the head."""
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    head = getattr(model, "lm_head", None)
    return sum(table.numel() for table in tables if isinstance(head, nn.Linear) and table is not head.weight)
