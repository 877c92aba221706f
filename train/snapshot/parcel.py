"""Files on their way between processes, in pieces that no buffer is too small for."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

_PIECE_BYTES = 64 << 20


def swap(
    data: Tensor, keeper: int | None, wards: Mapping[int, int], group: dist.ProcessGroup | None
) -> dict[int, Tensor]:
    """This process's bytes go to its keeper, those of its wards come: `wards` says of how many bytes each."""
    sent = [] if keeper is None else [dist.isend(piece, keeper, group) for piece in _pieces(data)]
    found = {rank: torch.empty(count, dtype=torch.uint8) for rank, count in wards.items()}
    for rank, room in found.items():
        for piece in _pieces(room):
            dist.recv(piece, rank, group)
    for work in sent:
        assert work is not None
        work.wait()
    return found


def hand_out(data: Tensor | None, count: int, owner: int, group: dist.ProcessGroup | None) -> Tensor:
    """What `owner` has, on every process; all take part."""
    found = torch.empty(count, dtype=torch.uint8) if data is None else data
    if group is not None:
        for piece in _pieces(found):
            dist.broadcast(piece, owner, group)
    return found


def _pieces(data: Tensor) -> tuple[Tensor, ...]:
    return torch.split(data, _PIECE_BYTES)
