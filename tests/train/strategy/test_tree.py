from __future__ import annotations

import itertools
import math

import pytest

from pipeline.spec.rank import Rank
from train.strategy.tree import fold, halves, roots


def written(node: range, known: dict[range, str]) -> str:
    return fold(node, known.get, lambda left, right: f"({left}+{right})")


def leaves(count: int) -> dict[range, str]:
    return {range(i, i + 1): str(i) for i in range(count)}


def test_four_shards_are_added_in_pairs() -> None:
    assert written(range(4), leaves(4)) == "((0+1)+(2+3))"
    assert written(range(3), leaves(3)) == "(0+(1+2))"
    assert written(range(1), leaves(1)) == "0"


@pytest.mark.parametrize("shards", range(1, 13))
def test_however_the_shards_are_held_their_sum_is_written_the_same_way(shards: int) -> None:
    whole = written(range(shards), leaves(shards))
    for size in range(1, shards + 1):
        parts: dict[range, str] = {}
        for rank in range(size):
            held = Rank(rank, world_size=size).slice_of(shards)
            mine = roots(range(shards), held)
            assert list(itertools.chain(*mine)) == list(held)
            assert len(mine) <= 2 * max(1, math.ceil(math.log2(len(held) + 1)))
            parts |= {node: written(node, leaves(shards)) for node in mine}
        assert written(range(shards), parts) == whole


def test_a_process_that_holds_a_whole_half_tells_one_sum() -> None:
    assert roots(range(4), range(2)) == [range(2)]
    assert roots(range(4), range(1, 3)) == [range(1, 2), range(2, 3)]
    assert roots(range(4), range(4)) == [range(4)]
    assert roots(range(8), range(2, 8)) == [range(2, 4), range(4, 8)]


def test_a_path_is_finished_before_the_next_is_begun() -> None:
    """So that memory holds one sum for each level, not one for each shard."""
    order: list[str] = []

    def known(node: range) -> str | None:
        if len(node) > 1:
            return None
        order.append(f"shard {node.start}")
        return str(node.start)

    def add(left: str, right: str) -> str:
        order.append(f"{left} and {right}")
        return f"{left}{right}"

    fold(range(4), known, add)
    assert order == ["shard 0", "shard 1", "0 and 1", "shard 2", "shard 3", "2 and 3", "01 and 23"]


@pytest.mark.parametrize("count", range(2, 20))
def test_halves_are_all_of_it(count: int) -> None:
    left, right = halves(range(3, 3 + count))
    assert [*left, *right] == list(range(3, 3 + count))
    assert left
    assert right
