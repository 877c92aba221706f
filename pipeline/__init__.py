"""Train a PyTorch model, evaluate it, export it to ONNX and deploy it.

This is the public API for a project's `task.py` and `codec.py`, and for notebooks. Importing it loads neither torch nor
numpy: each name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.contract.codec import Arrays, Codec
    from pipeline.contract.data import (
        PackedRows,
        Samples,
        cut_texts,
        fill_rows,
        mask_between_texts,
        one_text_per_row,
        pack_texts,
    )
    from pipeline.contract.loops import generate, repeat
    from pipeline.contract.run import Run
    from pipeline.contract.signature import Drawing, Prompting
    from pipeline.contract.task import Batch, Boxes, Embedding, Outputs, Split, TaggedText, Task
    from pipeline.history import open_run
    from pipeline.system.errors import ConfigError, DataError, InvalidPayload, PipelineError
    from pipeline.user.cross_entropy import linear_cross_entropy, log_probs_in_training
    from pipeline.user.post_training import (
        IGNORED,
        answer_log_probs,
        chat_labels,
        completion_labels,
        dpo_loss,
        token_log_probs,
    )
    from pipeline.user.readers import read_dataset, read_images, read_jsonl, read_shards, read_table
    from pipeline.user.token_shards import read_token_shards, write_token_shards

__all__ = [
    "IGNORED",
    "Arrays",
    "Batch",
    "Boxes",
    "Codec",
    "ConfigError",
    "DataError",
    "Drawing",
    "Embedding",
    "InvalidPayload",
    "Outputs",
    "PackedRows",
    "PipelineError",
    "Prompting",
    "Run",
    "Samples",
    "Split",
    "TaggedText",
    "Task",
    "answer_log_probs",
    "chat_labels",
    "completion_labels",
    "cut_texts",
    "dpo_loss",
    "fill_rows",
    "generate",
    "linear_cross_entropy",
    "log_probs_in_training",
    "mask_between_texts",
    "one_text_per_row",
    "open_run",
    "pack_texts",
    "read_dataset",
    "read_images",
    "read_jsonl",
    "read_shards",
    "read_table",
    "read_token_shards",
    "repeat",
    "token_log_probs",
    "write_token_shards",
]

_MODULES = {
    "api": ("Bundle",),
    "contract.codec": ("Arrays", "Codec"),
    "contract.data": (
        "PackedRows",
        "Samples",
        "cut_texts",
        "fill_rows",
        "mask_between_texts",
        "one_text_per_row",
        "pack_texts",
    ),
    "contract.loops": ("generate", "repeat"),
    "contract.run": ("Run",),
    "contract.signature": ("Drawing", "Prompting"),
    "contract.task": ("Batch", "Boxes", "Embedding", "Outputs", "Split", "TaggedText", "Task"),
    "history": ("open_run",),
    "system.errors": ("ConfigError", "DataError", "InvalidPayload", "PipelineError"),
    "user.cross_entropy": ("linear_cross_entropy", "log_probs_in_training"),
    "user.post_training": (
        "IGNORED",
        "answer_log_probs",
        "chat_labels",
        "completion_labels",
        "dpo_loss",
        "token_log_probs",
    ),
    "user.readers": ("read_dataset", "read_images", "read_jsonl", "read_shards", "read_table"),
    "user.token_shards": ("read_token_shards", "write_token_shards"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"pipeline.{module}"), name)
    raise AttributeError(f"module 'pipeline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
