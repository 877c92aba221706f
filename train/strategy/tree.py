"""A fixed binary tree over numbered shards: the order in which their gradients are added, whoever computes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Summand = TypeVar("Summand")


def roots(node: range, held: range) -> list[range]:
    """The largest parts of the tree below `node` of which every shard is held, in the order of shards."""
    if held.start <= node.start and node.stop <= held.stop:
        return [node]
    if node.stop <= held.start or held.stop <= node.start:
        return []
    return [root for half in halves(node) for root in roots(half, held)]


def fold(node: range, known: Callable[[range], Summand | None], add: Callable[[Summand, Summand], Summand]) -> Summand:
    """The sum of a node: known as a whole, or that of its halves. Asks from left to right, one path at a time."""
    found = known(node)
    if found is not None:
        return found
    left, right = halves(node)
    first = fold(left, known, add)
    return add(first, fold(right, known, add))


def halves(node: range) -> tuple[range, range]:
    middle = (node.start + node.stop) // 2
    return range(node.start, middle), range(middle, node.stop)
