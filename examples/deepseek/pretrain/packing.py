"""Documents of unequal length in rows of equal length, so that little of a row is padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Integers = np.ndarray[tuple[int, int], np.dtype[np.int64]]


@dataclass(frozen=True)
class Rows:
    """`segments` numbers the documents of a row from 1 on; 0 is padding, on the left. Positions begin anew in each."""

    ids: Integers
    segments: Integers
    positions: Integers

    @property
    def padding(self) -> float:
        """Share of places that hold no token."""
        return float((self.segments == 0).mean())


def cut(documents: Sequence[Sequence[int]], length: int) -> list[Sequence[int]]:
    """Documents longer than a row become several; of two tokens at least, or there is nothing to predict."""
    pieces = [document[start : start + length] for document in documents for start in range(0, len(document), length)]
    return [piece for piece in pieces if len(piece) > 1]


def pack(documents: Sequence[Sequence[int]], length: int, pad: int) -> Rows:
    """First fit in the order of the documents: each goes into the first open row with room for it."""
    rows: list[list[Sequence[int]]] = []
    room: list[int] = []
    first = [0] * (length + 1)  # of rows with this much room or more, none comes before
    for document in documents:
        needed = len(document)
        place = next((i for i in range(first[needed], len(rows)) if room[i] >= needed), len(rows))
        if place == len(rows):
            rows.append([])
            room.append(length)
        rows[place].append(document)
        room[place] -= needed
        for more in range(needed, length + 1):  # who needs as much or more finds nothing before this place either
            first[more] = max(first[more], place)
    return _fill(rows, length, pad)


def one_a_row(documents: Sequence[Sequence[int]], length: int, pad: int) -> Rows:
    """Without packing, as requests arrive."""
    return _fill([[document] for document in documents], length, pad)


def _fill(rows: Sequence[Sequence[Sequence[int]]], length: int, pad: int) -> Rows:
    ids = np.full((len(rows), length), pad, np.int64)
    segments, positions = np.zeros_like(ids), np.zeros_like(ids)
    for index, row in enumerate(rows):
        start = length - sum(map(len, row))
        for number, document in enumerate(row, start=1):
            place = slice(start, start := start + len(document))
            ids[index, place] = document
            segments[index, place] = number
            positions[index, place] = np.arange(len(document))
    return Rows(ids, segments, positions)
