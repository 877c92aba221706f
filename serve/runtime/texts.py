"""What the rest of the service knows of a language model; `serve/llm` has it."""

from __future__ import annotations

from concurrent.futures import Executor
from typing import Protocol

from pipeline.contract.bundle import Bundle
from serve.monitoring.metrics import Tokens


class TextModel(Protocol):
    """A loaded and checked language model."""

    def open(self, bundle: Bundle, pool: Executor) -> TextRunner: ...


class TextRunner(Protocol):
    """Generates the texts of one version."""

    batching: str  # how texts share batches, for the metadata

    def tokens(self) -> Tokens: ...
