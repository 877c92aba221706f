"""What a user writes in `task.py`, and how it is loaded. Needs torch only where a task does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from pipeline.spec.errors import ConfigError
from pipeline.spec.plugin import load_class

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.data import Dataset

    Batch: TypeAlias = Mapping[str, Tensor]
    # One declared output is a bare tensor; several are a mapping by their declared names.
    Outputs: TypeAlias = Tensor | Mapping[str, Tensor]
    Columns: TypeAlias = Mapping[str, Any]
    Split: TypeAlias = Columns | Dataset[Mapping[str, Any]]
    Predictor: TypeAlias = Callable[[Batch], Outputs]

SPLITS = ("train", "validation", "test")


class Task(Protocol):
    """A model, its data, and what "good" means. Every tensor's first axis counts samples."""

    inputs: Sequence[str]  # batch columns handed to the model, in the order of forward()'s arguments
    outputs: Sequence[str]  # names of what the model returns

    def model(self) -> nn.Module: ...

    def data(self, split: str) -> Split:
        """`train`, `validation` or `test`: columns of equal length, or a map-style data set of mappings."""

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Mean over the samples of the batch."""

    def metrics(self, outputs: Outputs, batch: Batch) -> Mapping[str, Tensor]:
        """One value per sample for each metric, higher is better; their mean is the metric."""


@runtime_checkable
class HasBaseline(Protocol):
    def baseline(self) -> Predictor:
        """What the model must not be worse than, already fitted on the training split."""


@runtime_checkable
class HasExample(Protocol):
    def example(self) -> Sequence[Any]:
        """A few instances as a client would send them; they become golden requests."""


@runtime_checkable
class HasParallelize(Protocol):
    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Sequence[str] | None:
        """How the model is cut over the processes of `mesh`, whose one axis is called `tensor` or `pipeline`.

        For `tensor`, cut layers in place with torch's `parallelize_module`. For `pipeline`, change nothing and
        return the names of the modules at which the second and later stages begin.
        """


@runtime_checkable
class Classifier(Protocol):
    """Adds class balance, per-class metrics, the confusion matrix and the count of flipped answers."""

    classes: Sequence[str]

    def predicted(self, outputs: Outputs) -> Tensor:
        """Class index per sample."""

    def actual(self, batch: Batch) -> Tensor:
        """True class index per sample."""


def load_task(reference: str, root: Path) -> Task:
    """Import and build the task, and say which required part is missing."""
    kind = load_class(reference, root)
    try:
        task: Task = kind()
    except TypeError as error:
        raise ConfigError(f"{reference}: cannot be built without arguments ({error})") from error
    for method, signature in _METHODS.items():
        if not callable(getattr(task, method, None)):
            raise ConfigError(f"{reference}: has no method {signature}; every task needs it")
    for attribute in ("inputs", "outputs"):
        if not _are_names(getattr(task, attribute, None)):
            raise ConfigError(f'{reference}: set `{attribute} = ("name", ...)`, the names of the model\'s {attribute}')
    return task


def _are_names(value: object) -> bool:
    """At least one, each a word of its own."""
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(isinstance(name, str) and name for name in value) and len(set(value)) == len(value)


_METHODS = {
    "model": "model()",
    "data": "data(split)",
    "loss": "loss(outputs, batch)",
    "metrics": "metrics(outputs, batch)",
}
