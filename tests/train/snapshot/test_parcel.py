from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from train.group import Group
from train.snapshot import parcel

from ..together import together


def of(rank: int) -> torch.Tensor:
    return torch.arange(10 + rank, dtype=torch.uint8) + 100 * rank


def swap_in_a_ring(group: Group) -> Any:
    """In pieces of four bytes, of which the last ones are shorter."""
    parcel._PIECE_BYTES = 4
    rank, ward = group.rank.rank, (group.rank.rank + 2) % 3
    found = parcel.swap(of(rank), (rank + 1) % 3, {ward: 10 + ward}, dist.group.WORLD)
    return {sender: part.tolist() for sender, part in found.items()}


def test_everybody_gets_what_its_wards_send() -> None:
    assert together(swap_in_a_ring, 3) == [{ward: of(ward).tolist()} for ward in (2, 0, 1)]


def give_to_all(group: Group) -> list[int]:
    parcel._PIECE_BYTES = 4
    mine = of(1) if group.rank.rank == 1 else None
    return parcel.hand_out(mine, 11, 1, dist.group.WORLD).tolist()


def test_what_one_has_is_handed_out_to_all() -> None:
    assert together(give_to_all, 2) == [of(1).tolist()] * 2


@pytest.mark.parametrize("mine", [torch.empty(0, dtype=torch.uint8), of(1)])
def test_a_process_alone_keeps_what_it_has(mine: torch.Tensor) -> None:
    assert parcel.swap(mine, None, {}, None) == {}
    assert parcel.hand_out(mine, len(mine), 0, None) is mine
