"""Texts of unequal length in rows of equal length, several to a row, so that little of what is computed is padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.spec.errors import DataError

Integers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Rows:
    """`segments` numbers the texts of a row from 1 on; 0 is padding, on the left. Positions begin anew in each text."""

    ids: Integers
    segments: Integers
    positions: Integers

    @property
    def padding(self) -> float:
        """Share of places that hold no token."""
        return float((self.segments == 0).mean())


def cut(texts: Sequence[Sequence[int]], length: int) -> list[Sequence[int]]:
    """Texts longer than a row become several; of two tokens at least, or there is nothing to predict."""
    pieces = [text[start : start + length] for text in texts for start in range(0, len(text), length)]
    return [piece for piece in pieces if len(piece) > 1]


def pack(texts: Sequence[Sequence[int]], length: int, pad: int) -> Rows:
    """First fit in the order given: each text goes into the first row with room for it."""
    rows: list[list[Sequence[int]]] = []
    room: list[int] = []
    first = [0] * (length + 1)  # of rows with this much room or more, none comes before
    for text in texts:
        needed = min(len(text), length)  # who is longer is refused where rows are filled
        place = next((i for i in range(first[needed], len(rows)) if room[i] >= needed), len(rows))
        if place == len(rows):
            rows.append([])
            room.append(length)
        rows[place].append(text)
        room[place] -= needed
        for more in range(needed, length + 1):  # who needs as much or more finds nothing before this place either
            first[more] = max(first[more], place)
    return _fill(rows, length, pad)


def one_a_row(texts: Sequence[Sequence[int]], length: int, pad: int) -> Rows:
    """Without packing, as requests arrive: what is judged should look like what is served."""
    return _fill([[text] for text in texts], length, pad)


def _fill(rows: Sequence[Sequence[Sequence[int]]], length: int, pad: int) -> Rows:
    longest = max((sum(map(len, row)) for row in rows), default=0)
    if longest > length:
        raise DataError(f"a text of {longest} tokens is longer than a row of {length}; cut() the texts first")
    ids = np.full((len(rows), length), pad, np.int64)
    segments, positions = np.zeros_like(ids), np.zeros_like(ids)
    for index, row in enumerate(rows):
        start = length - sum(map(len, row))
        for number, text in enumerate(row, start=1):
            place = slice(start, start := start + len(text))
            ids[index, place] = text
            segments[index, place] = number
            positions[index, place] = np.arange(len(text))
    return Rows(ids, segments, positions)
