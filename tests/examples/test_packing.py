from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from .conftest import Module


@pytest.fixture
def packing(pretrain_module: Module) -> Any:
    return pretrain_module("packing")


def lengths(seed: int) -> list[int]:
    """As definitions have them: many short, few long."""
    draw = random.Random(seed)
    return [min(2 + int(draw.expovariate(1 / 12)), 40) for _ in range(300)]


@pytest.mark.parametrize("seed", range(3))
def test_every_document_stands_in_one_row_whole_and_once(packing: Any, seed: int) -> None:
    documents = [[1000 * number + place for place in range(length)] for number, length in enumerate(lengths(seed), 1)]
    rows = packing.pack(documents, 40, pad=7)
    found = []
    for ids, segments, positions in zip(rows.ids, rows.segments, rows.positions, strict=True):
        assert (np.diff(segments) >= 0).all(), "padding on the left, then the documents in order"
        assert (ids[segments == 0] == 7).all()
        for number in range(1, segments.max() + 1):
            own = segments == number
            assert positions[own].tolist() == list(range(own.sum()))
            found.append(ids[own].tolist())
    assert sorted(found) == documents


def test_packing_leaves_little_padding_where_rows_of_their_own_would_be_mostly_that(packing: Any) -> None:
    documents = [[1] * length for length in lengths(0)]
    assert packing.one_a_row(documents, 40, pad=0).padding > 0.6
    assert packing.pack(documents, 40, pad=0).padding < 0.02


def test_a_document_goes_into_the_first_row_with_room(packing: Any) -> None:
    rows = packing.pack([[1] * 6, [2] * 5, [3] * 4, [4] * 5, [5] * 10], 10, pad=0)
    assert [sorted(set(row.tolist())) for row in rows.ids] == [[1, 3], [2, 4], [5]]


def test_a_long_document_is_cut_and_an_end_without_anything_to_predict_is_left_out(packing: Any) -> None:
    assert packing.cut([list(range(9)), [1], []], 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
