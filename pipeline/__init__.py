"""Train a PyTorch model, evaluate it, export it to ONNX and deploy it.

This is the public API for a project's `task.py` and `codec.py`, and for notebooks. Importing it loads neither torch nor
numpy: each name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.contract.codec import Arrays as Arrays
    from pipeline.contract.codec import Codec as Codec
    from pipeline.contract.data import PackedRows as PackedRows
    from pipeline.contract.data import Samples as Samples
    from pipeline.contract.data import cut_texts as cut_texts
    from pipeline.contract.data import fill_rows as fill_rows
    from pipeline.contract.data import mask_between_texts as mask_between_texts
    from pipeline.contract.data import one_text_per_row as one_text_per_row
    from pipeline.contract.data import pack_texts as pack_texts
    from pipeline.contract.given import ExportedModel as ExportedModel
    from pipeline.contract.given import OnnxModel as OnnxModel
    from pipeline.contract.loops import generate as generate
    from pipeline.contract.loops import repeat as repeat
    from pipeline.contract.run import Run as Run
    from pipeline.contract.signature import Drawing as Drawing
    from pipeline.contract.signature import Prompting as Prompting
    from pipeline.contract.task import Batch as Batch
    from pipeline.contract.task import Boxes as Boxes
    from pipeline.contract.task import Embedding as Embedding
    from pipeline.contract.task import Outputs as Outputs
    from pipeline.contract.task import Split as Split
    from pipeline.contract.task import TaggedText as TaggedText
    from pipeline.contract.task import Task as Task
    from pipeline.history import open_run as open_run
    from pipeline.system.errors import ConfigError as ConfigError
    from pipeline.system.errors import DataError as DataError
    from pipeline.system.errors import InvalidPayload as InvalidPayload
    from pipeline.system.errors import PipelineError as PipelineError
    from pipeline.user.cross_entropy import linear_cross_entropy as linear_cross_entropy
    from pipeline.user.cross_entropy import log_probs_in_training as log_probs_in_training
    from pipeline.user.post_training import IGNORED as IGNORED
    from pipeline.user.post_training import answer_log_probs as answer_log_probs
    from pipeline.user.post_training import chat_labels as chat_labels
    from pipeline.user.post_training import completion_labels as completion_labels
    from pipeline.user.post_training import dpo_loss as dpo_loss
    from pipeline.user.post_training import token_log_probs as token_log_probs
    from pipeline.user.readers import read_dataset as read_dataset
    from pipeline.user.readers import read_images as read_images
    from pipeline.user.readers import read_jsonl as read_jsonl
    from pipeline.user.readers import read_shards as read_shards
    from pipeline.user.readers import read_table as read_table
    from pipeline.user.readers import read_token_shards as read_token_shards
    from pipeline.user.readers import write_token_shards as write_token_shards

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
    "contract.given": ("ExportedModel", "OnnxModel"),
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
    "user.readers": (
        "read_dataset",
        "read_images",
        "read_jsonl",
        "read_shards",
        "read_table",
        "read_token_shards",
        "write_token_shards",
    ),
}

__all__ = [name for names in _MODULES.values() for name in names]


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"pipeline.{module}"), name)
    raise AttributeError(f"module 'pipeline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
