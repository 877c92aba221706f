from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pipeline.contract.errors import BundleError
from serve.generate.kv_cache import Block, Layer, Room, gathered, layers_of, placed
from tests.serve.generate import tiny

LAYER = Layer("past", "present", heads=1, width=1, kind=np.float32)


def _block(*rows: list[int]) -> Block:
    """Rows of values from 1 on, padded on the left with 99."""
    past = max(map(len, rows))
    pads = [past - len(row) for row in rows]
    values = [[99] * pad + row for pad, row in zip(pads, rows, strict=True)]
    array = np.array(values, np.float32).reshape(len(rows), 1, past, 1)
    return Block(np.array(pads), past, (placed(array, "cpu"),))


def _rows(block: Block) -> list[list[int]]:
    """What is somebody's of each row."""
    values: Any = block.values[0].numpy()
    return [row[pad:, 0].astype(int).tolist() for row, pad in zip(values[:, 0], block.pads, strict=True)]


def test_rows_join_and_leave_and_keep_what_is_theirs() -> None:
    one, other = _block([1, 2, 3], [4]), _block([5, 6, 7, 8, 9])
    joined = gathered([LAYER], [(one, [1, 0]), (other, [0])], "cpu")
    assert _rows(joined) == [[4], [1, 2, 3], [5, 6, 7, 8, 9]]
    assert (joined.past, joined.rows) == (5, 3)
    left = gathered([LAYER], [(joined, [1, 0])], "cpu")
    assert _rows(left) == [[1, 2, 3], [4]]
    assert left.past == 3, "padding that nobody needs is let go"


def test_a_row_may_be_taken_several_times() -> None:
    assert _rows(gathered([LAYER], [(_block([1, 2]), [0, 0])], "cpu")) == [[1, 2], [1, 2]]


def test_padding_is_masked_and_places_begin_at_a_row_s_own_text() -> None:
    block = _block([1, 2, 3], [4])
    assert block.mask(2).tolist() == [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]
    assert block.positions(2).tolist() == [[3, 4], [1, 2]]
    unread = Block(np.array([0, 2]), 0, ())
    assert unread.mask(3).tolist() == [[1, 1, 1], [0, 0, 1]]
    assert unread.positions(3).tolist() == [[0, 1, 2], [0, 0, 0]]


def test_room_counts_a_rectangle_twice() -> None:
    room = Room(position_bytes=10, most_bytes=400)
    assert room.bytes(2, 10) == 400
    assert room.fits(2, 10)
    assert not room.fits(2, 11)


@pytest.mark.parametrize("shape", [("batch", "heads", "past", 8), ("batch", 2, "past"), ("batch", 2, "past", "width")])
def test_a_cache_of_unknown_size_is_refused(shape: Any) -> None:
    signature = tiny.signature()
    odd = signature.inputs[-1].model_copy(update={"shape": shape})
    wrong = signature.model_copy(update={"inputs": (*signature.inputs[:-1], odd)})
    assert wrong.generation is not None
    with pytest.raises(BundleError, match=r"cache past\.1\.value is FP32 .* expected FP32 or FP16"):
        layers_of(wrong, wrong.generation)


def test_caches_of_half_precision_take_half_the_memory_and_stay_what_they_are() -> None:
    layer = Layer("past", "present", heads=1, width=1, kind=np.float16)
    assert (layer.position_bytes, LAYER.position_bytes) == (2, 4)
    half = Block(np.array([0]), 2, (placed(np.ones((1, 1, 2, 1), np.float16), "cpu"),))
    joined: Any = gathered([layer], [(half, [0]), (half, [0])], "cpu").values[0].numpy()
    assert (joined.dtype, joined.shape) == (np.float16, (2, 1, 2, 1))
