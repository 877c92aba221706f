"""Where checkpoints are kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from train.checkpoint.manifest import Written

Deed = Callable[[], None]


class Place(Protocol):
    """Files of a checkpoint come one by one, from several processes; `commit` makes them one that counts."""

    def begin(self, token: str) -> None:
        """Once before the first `write`: `token` tells this attempt at training from every other."""

    def write(self, step: int, name: str, data: memoryview) -> Written: ...

    def commit(self, step: int, manifest: bytes, before: Deed) -> None:
        """By the first process, when all have written; `before` is done when nothing but this can fail any more."""

    def discard(self, step: int) -> None:
        """What was written of a checkpoint that will not be complete."""

    def steps(self) -> list[int]:
        """Of checkpoints that were committed, in order."""

    def manifest(self, step: int) -> bytes: ...

    def read(self, step: int, name: str) -> Tensor:
        """A file, as bytes; of a local one what is looked at is read."""

    def head(self, step: int, name: str, start: int, count: int) -> bytes: ...

    def remove(self, step: int) -> None: ...

    def clean(self) -> None:
        """Throw away what attempts that were killed have left."""
