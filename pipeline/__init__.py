"""Train a PyTorch model, evaluate it, export it to ONNX and deploy it.

This is the public API for a project's `task.py` and `codec.py`. Importing it loads neither torch nor numpy: each name
is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.contract.codec import Arrays, Codec
    from pipeline.contract.data import Samples, cut, one_a_row, pack, see_documents
    from pipeline.contract.errors import ConfigError, DataError, InvalidPayload, PipelineError
    from pipeline.contract.signature import Drawing, Prompting
    from pipeline.contract.task import Batch, Outputs, Split, Task

_MODULES = {
    "Arrays": "codec",
    "Batch": "task",
    "Codec": "codec",
    "ConfigError": "errors",
    "DataError": "errors",
    "Drawing": "signature",
    "InvalidPayload": "errors",
    "Outputs": "task",
    "PipelineError": "errors",
    "Prompting": "signature",
    "Samples": "data",
    "Split": "task",
    "Task": "task",
    "cut": "data",
    "one_a_row": "data",
    "pack": "data",
    "see_documents": "data",
}

__all__ = [
    "Arrays",
    "Batch",
    "Codec",
    "ConfigError",
    "DataError",
    "Drawing",
    "InvalidPayload",
    "Outputs",
    "PipelineError",
    "Prompting",
    "Samples",
    "Split",
    "Task",
    "cut",
    "one_a_row",
    "pack",
    "see_documents",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module `pipeline` has no attribute `{name}`")
    return getattr(import_module(f"pipeline.contract.{_MODULES[name]}"), name)
