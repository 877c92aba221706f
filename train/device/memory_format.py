"""The memory format channels_last of pictures and volumes, in which the convolutions of a GPU are fastest.

Only inputs are converted, and layers pass the format on: weights, and with them checkpoints, keep their layout.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn

from pipeline.contract.data import Samples, forward
from pipeline.contract.task import Task
from train.state import restored_buffers

Formats: TypeAlias = Mapping[int, torch.memory_format]  # by the number of axes

_LAYERS = {4: nn.Conv2d, 5: nn.Conv3d}
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_VIEW_FAILED = "view size is not compatible"  # in torch's message


def choose_input_formats(
    model: nn.Module, task: Task, samples: Samples, device: torch.device, *, logs: bool
) -> Formats:
    """Return the formats of the model's inputs on a GPU; none for a model that depends on the order of the memory."""
    if device.type != "cuda":
        return {}
    formats = formats_of_layers(model)
    if formats and not accepts_formats(model, task, samples, formats, device):
        if logs:
            print(
                "the model calls view() on what a convolution returns, so its inputs are not in channels_last; "
                "to train faster, call flatten() or reshape() instead",
                flush=True,
            )
        return {}
    return formats


def formats_of_layers(model: nn.Module) -> Formats:
    """Return the formats in which the convolutions of a model are fastest."""
    return {
        axes: _CHANNELS_LAST[axes]
        for axes, layer in _LAYERS.items()
        if any(isinstance(module, layer) for module in model.modules())
    }


def convert_inputs(batch: Mapping[str, Tensor], inputs: Collection[str], formats: Formats) -> Mapping[str, Tensor]:
    """Return a batch whose inputs of floating-point numbers are in these formats."""
    if not formats:
        return batch
    return {
        name: column.contiguous(memory_format=formats[column.ndim])
        if name in inputs and column.ndim in formats and column.is_floating_point()
        else column
        for name, column in batch.items()
    }


@torch.no_grad()
def accepts_formats(model: nn.Module, task: Task, samples: Samples, formats: Formats, device: torch.device) -> bool:
    """Return whether a pass of two samples in these formats works; assume so while weights are not read yet."""
    if any(parameter.is_meta for parameter in model.parameters()):
        return True
    model.to(device)
    batch = {name: column.to(device) for name, column in samples.batch(samples.ends).items()}
    try:
        with restored_buffers(model):
            forward(model, task, convert_inputs(batch, task.inputs, formats))
    except RuntimeError as error:
        return _VIEW_FAILED not in str(error)  # another error is not about the format, and training shows it
    return True
