"""Save and load trained weights as safetensors, which cannot run code when it is loaded."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pipeline.contract.errors import StageError


def save_weights(state: Mapping[str, Tensor], path: Path, step: int | None = None) -> None:
    """Write tied weights once per name, because safetensors rejects shared memory; `step` is stored in the header."""
    tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in state.items()}
    save_file(tensors, path, None if step is None else {"step": str(step)})


def load_weights(model: nn.Module, path: Path, device: torch.device | str = "cpu") -> nn.Module:
    """Load all weights into a model and set evaluation mode."""
    try:
        model.load_state_dict(load_file(path, device=str(device)))
    except (SafetensorError, RuntimeError, OSError) as error:
        raise StageError(f"{path}: does not fit the task's model: {' '.join(str(error).split())[:400]}") from error
    return model.to(device).eval()


def transformers_model(model: nn.Module) -> tuple[str, nn.Module] | None:
    """Return the name and module of the outermost transformers model, if there is one."""
    if "transformers" not in sys.modules:  # then no task has built one
        return None
    from transformers import PreTrainedModel

    return next(((name, module) for name, module in model.named_modules() if isinstance(module, PreTrainedModel)), None)
