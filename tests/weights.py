"""Weights of a model that no step has trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def save_weights(state: Mapping[str, Tensor], path: Path, step: int | None = None) -> None:
    """Write the file of the train step; tied weights are written once per name."""
    tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in state.items()}
    save_file(tensors, path, None if step is None else {"step": str(step)})
