from __future__ import annotations

import pytest

from pipeline.spec.rank import Rank


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 8, 97])
def test_slices_cover_every_item_once_in_order_and_differ_by_one_at_most(world_size: int, count: int) -> None:
    slices = [Rank(rank, rank, world_size).slice_of(count) for rank in range(world_size)]
    assert [i for part in slices for i in part] == list(range(count))
    assert max(map(len, slices)) - min(map(len, slices)) <= 1


def test_a_process_started_alone_is_the_first_of_one() -> None:
    assert Rank.from_env({}) == Rank(0, 0, 1)
    assert Rank.from_env({}).first


def test_the_launcher_tells_the_place() -> None:
    found = Rank.from_env({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"})
    assert found == Rank(rank=3, local_rank=1, world_size=4)
    assert not found.first
