from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pipeline.system.errors import BundleError
from serve.llm.kv_cache import CacheBudget, CacheLayer, KVCache, cache_layers, gather, to_device
from tests.serve.llm import tiny

LAYER = CacheLayer("past", "present", heads=1, width=1, dtype=np.float32)


def _cache(*rows: list[int]) -> KVCache:
    """Build a cache of these rows, padded on the left with 99."""
    past = max(map(len, rows))
    pads = [past - len(row) for row in rows]
    values = [[99] * pad + row for pad, row in zip(pads, rows, strict=True)]
    array = np.array(values, np.float32).reshape(len(rows), 1, past, 1)
    return KVCache(np.array(pads), past, (to_device(array, "cpu"),))


def _rows(block: KVCache) -> list[list[int]]:
    """Return the values of each row without padding."""
    values: Any = block.values[0].numpy()
    return [row[pad:, 0].astype(int).tolist() for row, pad in zip(values[:, 0], block.pads, strict=True)]


def test_rows_keep_their_values_when_joining_and_leaving() -> None:
    one, other = _cache([1, 2, 3], [4]), _cache([5, 6, 7, 8, 9])
    joined = gather([LAYER], [(one, [1, 0]), (other, [0])], "cpu")
    assert _rows(joined) == [[4], [1, 2, 3], [5, 6, 7, 8, 9]]
    assert (joined.past, joined.rows) == (5, 3)
    left = gather([LAYER], [(joined, [1, 0])], "cpu")
    assert _rows(left) == [[1, 2, 3], [4]]
    assert left.past == 3, "padding that is not needed is dropped"


def test_row_can_be_gathered_twice() -> None:
    assert _rows(gather([LAYER], [(_cache([1, 2]), [0, 0])], "cpu")) == [[1, 2], [1, 2]]


def test_padding_is_masked_and_positions_start_after_it() -> None:
    cache = _cache([1, 2, 3], [4])
    assert cache.mask(2).tolist() == [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]
    assert cache.positions(2).tolist() == [[3, 4], [1, 2]]
    unread = KVCache(np.array([0, 2]), 0, ())
    assert unread.mask(3).tolist() == [[1, 1, 1], [0, 0, 1]]
    assert unread.positions(3).tolist() == [[0, 1, 2], [0, 0, 0]]


def test_budget_counts_the_cache_that_runs_twice() -> None:
    budget = CacheBudget(position_bytes=10, max_bytes=400)
    assert budget.bytes([20]) == 400
    assert budget.bytes([20, 10, 0]) == 500, "only one of several caches runs at a time"
    assert budget.bytes([]) == 0
    assert budget.max_positions == 20


@pytest.mark.parametrize("shape", [("batch", "heads", "past", 8), ("batch", 2, "past"), ("batch", 2, "past", "width")])
def test_cache_without_fixed_size_is_rejected(shape: Any) -> None:
    signature = tiny.signature()
    odd = signature.inputs[-1].model_copy(update={"shape": shape})
    wrong = signature.model_copy(update={"inputs": (*signature.inputs[:-1], odd)})
    assert wrong.generation is not None
    with pytest.raises(BundleError, match=r"cache past\.1\.value is FP32 .* expected FP32 or FP16"):
        cache_layers(wrong, wrong.generation)


def test_fp16_caches_stay_fp16() -> None:
    layer = CacheLayer("past", "present", heads=1, width=1, dtype=np.float16)
    assert (layer.position_bytes, LAYER.position_bytes) == (2, 4)
    half = KVCache(np.array([0]), 2, (to_device(np.ones((1, 1, 2, 1), np.float16), "cpu"),))
    joined: Any = gather([layer], [(half, [0]), (half, [0])], "cpu").values[0].numpy()
    assert (joined.dtype, joined.shape) == (np.float16, (2, 1, 2, 1))
