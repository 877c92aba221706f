"""The one place that decides which kind of model is exported; everything else uses what `ModelExporter` has."""

from __future__ import annotations

import logging

from torch import nn

from export.given import GivenFileExporter
from export.llm.kind import LanguageExporter
from export.ordinary import OrdinaryExporter
from export.subject import ModelExporter, Subject
from pipeline.contract.given import OnnxModel
from pipeline.contract.task import Generates, Task, input_axes, max_axis_sizes
from pipeline.system.errors import StageError

_TALKATIVE = ("torch.onnx", "torch.fx", "onnx_ir", "onnxscript")  # they log every node that they leave alone
_POSITIONS, _SOUND = "max_position_embeddings", "input_values"  # as transformers names them


def open_exporter(subject: Subject) -> ModelExporter:
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)
    check_mode(subject.model)
    check_positions(subject.task, subject.model)
    if isinstance(subject.task, Generates):
        return LanguageExporter(subject)
    return GivenFileExporter(subject) if isinstance(subject.model, OnnxModel) else OrdinaryExporter(subject)


def check_mode(model: nn.Module) -> None:
    """Reject modules that stay in training mode: dropout would be random and running statistics would change."""
    model.eval()
    if training := [name or type(model).__name__ for name, module in model.named_modules() if module.training]:
        raise StageError(
            f"{', '.join(training[:4])}: still in training mode after eval(); it would be exported with its dropout "
            "and running statistics; do not override train() in the model"
        )


def check_positions(task: Task, model: nn.Module) -> None:
    """Reject a `longest` beyond the positions the model was configured for."""
    configs = (getattr(module, "config", None) for module in model.modules())
    positions = (getattr(config, _POSITIONS, None) for config in configs)
    maximum = next((count for count in positions if isinstance(count, int)), None)
    texts = (axes for name, axes in input_axes(task).items() if len(axes) < len("NCHW") and name != _SOUND)
    rows = {axis for axes in texts for axis in axes}
    for axis, size in max_axis_sizes(task).items():
        if maximum is not None and axis in rows and size > maximum:
            raise StageError(f"`longest` allows {size} for axis `{axis}`, but the model's configuration ends at {maximum} ({_POSITIONS})")  # fmt: skip  # noqa: E501
