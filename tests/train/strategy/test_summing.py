from __future__ import annotations

import pytest
import torch
from torch import Tensor

from train.group import Group
from train.strategy.summing import Summing
from train.strategy.tree import fold

from ..together import together

SHARDS, WIDTH = 5, 11  # no number of processes divides them


def rows() -> Tensor:
    """Of numbers so different in size that another order of additions gives other bits."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SHARDS, WIDTH, generator=generator) * 10.0 ** torch.arange(-3, SHARDS - 3)[:, None]


def by_hand(node: range) -> Tensor:
    return fold(node, lambda one: rows()[one.start] if len(one) == 1 else None, Tensor.add)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_everybody_gets_the_sum_in_the_order_of_the_tree(size: int) -> None:
    expected = by_hand(range(SHARDS))
    assert not torch.equal(expected, rows().flip(0).cumsum(0)[-1]), "the order matters"
    for first, second in together(summed, size):
        assert torch.equal(first, expected)
        assert torch.equal(second, expected)


def summed(group: Group) -> list[Tensor]:
    """Twice, since the rows are used again."""
    summing = Summing(group, SHARDS, WIDTH, torch.float32)
    found = []
    for _ in range(2):
        for row, node in zip(summing.rows, summing.mine, strict=True):
            row[:WIDTH] = by_hand(node)
        summing.exchange()
        found.append(summing.total[:WIDTH].clone())
    return found
