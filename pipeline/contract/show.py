"""Values of a sample that the report displays: what the `show` method of a task returns besides plain values.

Texts, numbers, rows of a table and arrays need no class of their own; see `HasShow` in `pipeline/contract/task.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.contract.errors import DataError


@dataclass(frozen=True)
class TaggedText:
    """A text with a tag for each word; "" and "O" are no tag."""

    words: Sequence[str]
    tags: Sequence[str]

    def __post_init__(self) -> None:
        if len(self.words) != len(self.tags):
            raise DataError(f"TaggedText: needs one tag for each of its {len(self.words)} words, not {len(self.tags)}")


@dataclass(frozen=True)
class Boxes:
    """A picture with boxes drawn on it."""

    picture: Any  # rows × columns, with or without an axis of 1 or 3 channels
    boxes: Any  # one row (left, top, right, bottom) for each box, in pixels of the picture
    labels: Sequence[str] = ()
    scores: Sequence[float] = ()

    def __post_init__(self) -> None:
        for name, values in (("labels", self.labels), ("scores", self.scores)):
            if len(values) not in (0, len(self.boxes)):
                raise DataError(f"Boxes: has {len(self.boxes)} boxes and {len(values)} {name}; give one for each box")


@dataclass(frozen=True)
class Embedding:
    """A vector that is displayed as the texts of the nearest other vectors of the test set, by cosine similarity."""

    vector: Any
    text: str
    among: str = ""  # name under which the vectors to search are shown, such as "document"; empty: the same name
