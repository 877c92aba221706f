"""What a step minimises: the task's loss on the model's declared inputs, in the wanted precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from pipeline.spec.data import forward
from pipeline.spec.task import Task
from train.phase import phase
from train.precision import Precision

if TYPE_CHECKING:
    from pipeline.spec.task import Outputs


@dataclass(frozen=True)
class Objective:
    task: Task
    precision: Precision

    def outputs(self, module: nn.Module, batch: Mapping[str, Tensor]) -> Outputs:
        with self.precision.autocast():
            return forward(module, self.task, batch)

    def loss(self, module: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean over the samples of the batch."""
        with phase("forward"), self.precision.autocast():
            return self.task.loss(forward(module, self.task, batch), batch)

    def backward(self, loss: Tensor) -> None:
        with phase("backward"):
            self.precision.backward(loss)
