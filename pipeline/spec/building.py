"""The module a run trains, judges and exports: the task's own, or the one it makes of pretrained files."""

from __future__ import annotations

from torch import nn

from pipeline.spec.companions import companions_of
from pipeline.spec.errors import ConfigError
from pipeline.spec.run import Run
from pipeline.spec.task import HasPretrained, Task


def build_model(task: Task, run: Run) -> nn.Module:
    """Its weights are still to be filled in; in every step it is built of the files that prepare has kept."""
    if not run.config.model.pretrained:
        return task.model()
    return adapting(task, run.config.task).adapt(companions_of(run))


def adapting(task: Task, reference: str) -> HasPretrained:
    if not isinstance(task, HasPretrained):
        raise ConfigError(
            f"{reference}: has no method adapt(folder), which builds the model that model.pretrained begins; "
            "write it, or leave model.pretrained out"
        )
    return task
