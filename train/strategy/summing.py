"""Adding rows of numbers from all processes in the order of a tree, so that their number changes no bit."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.spec.rank import Rank
from train.group import Group
from train.strategy.tree import fold, roots

# torch 2.13 has a new name for it, and warns of the old one.
_gather: Callable[[Tensor, Tensor], object] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class Summing:
    """Each process hands in a row for every part of the tree it holds, and gets the sum over the whole tree.

    Everybody adds up its own share of the columns and tells it to all: the bytes of a ring's all-reduce, but the order
    of additions is the tree's and not the ring's.
    """

    def __init__(self, group: Group, shards: int, width: int, kind: torch.dtype) -> None:
        self._tree = range(shards)
        held = [Rank(rank, world_size=group.size).slice_of(shards) for rank in range(group.size)]
        self._parts = [roots(self._tree, mine) for mine in held]  # by rank
        self.mine = self._parts[group.rank.rank]
        self._share, self._size = -(-width // group.size), group.size
        padded, device = self._share * group.size, group.device
        self.rows = torch.zeros(len(self.mine), padded, dtype=kind, device=device)  # to be filled, one for each part
        self._received = torch.zeros(sum(map(len, self._parts)), self._share, dtype=kind, device=device)
        self.total = torch.zeros(padded, dtype=kind, device=device)

    @property
    def sent_bytes(self) -> int:
        """What this process hands over at each exchange."""
        return (self.rows.numel() + self._share) * self.rows.element_size()

    def exchange(self) -> None:
        """From `rows` to `total`."""
        count = len(self.mine)
        columns = self.rows.view(count, self._size, self._share).transpose(0, 1).contiguous()
        dist.all_to_all_single(
            self._received.view(-1),
            columns.view(-1),
            output_split_sizes=[len(parts) * self._share for parts in self._parts],
            input_split_sizes=[count * self._share] * self._size,
        )
        known = dict(zip((part for parts in self._parts for part in parts), self._received, strict=True))
        summed = fold(self._tree, known.get, Tensor.add_)
        _gather(self.total, summed)
