"""`elastic: exact`: the same bits with any number of processes, since neither cuts nor sums depend on it.

Adding rows of numbers from all processes in the order of a tree, so that their number changes no bit.

A fixed binary tree over numbered shards: the order in which their gradients are added, whoever computes them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.contract.errors import ConfigError
from pipeline.contract.processes import Rank
from pipeline.contract.settings.stages import Train
from train.parallel.base import Objective, Part, Strategy
from train.parallel.ddp import Rewinding, only_statistics
from train.process_group import Group

Gradient = list[Tensor | None]  # of each trained parameter; None: no pass came by it


@dataclass
class Passed:
    """The sum over some consecutive shards."""

    gradient: Gradient
    losses: list[Tensor]  # of each shard, summed over its samples


@dataclass(frozen=True)
class Row:
    """The same as a row of numbers that travels: views of its parts."""

    gradient: list[Tensor]
    there: Tensor  # for each parameter whether there is one: 0 or more
    losses: Tensor  # of all shards

    def fill(self, one: Passed, node: range) -> None:
        self.there.fill_(1)
        for i, found in enumerate(one.gradient):
            if found is None:
                self.gradient[i].zero_()
                self.there[i] = 0
        pairs = [(to, found) for to, found in zip(self.gradient, one.gradient, strict=True) if found is not None]
        if pairs:
            torch._foreach_copy_([to for to, _ in pairs], [found for _, found in pairs])
        self.losses.zero_()
        self.losses[node.start : node.stop] = torch.stack(one.losses)


class DeterministicDataParallel(Strategy):
    """A batch is cut into `elastic_shards` shards, and each process takes a row of them, one after the other.

    The random numbers of a pass, its micro-batches and the buffers it starts from are those of its shard. Gradients are
    added along a binary tree over the shards. Shard 0's buffers are the ones that stay, as those of rank 0 do in DDP.
    """

    def __init__(self, model: nn.Module, objective: Objective, group: Group, config: Train) -> None:
        self._count = config.elastic_shards
        if group.size > self._count:
            raise ConfigError(
                f"train.elastic=exact: {group.size} processes for {self._count} shards leave some without work; "
                f"set train.elastic_shards={group.size}, which gives other bits, or use fewer processes"
            )
        super().__init__(model, objective, group, config)

    def wrap(self) -> nn.Module:
        if self.group.size > 1:
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                dist.broadcast(tensor.detach(), 0)
        self._trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._kind = functools.reduce(torch.promote_types, [p.dtype for p in self._trained], torch.float32)
        width = sum(parameter.numel() for parameter in self._trained) + len(self._trained) + self._count
        self._summing = Summing(self.group, self._count, width, self._kind)
        self._rows = [self._cut(row) for row in self._summing.rows]
        self._total = self._cut(self._summing.total)
        self._equal_buffers = not only_statistics(self.model)  # of all processes, in every pass
        self._found, self._kept = Rewinding(self.model), Rewinding(self.model)
        return super().wrap()

    def slices(self, count: int) -> dict[int, range]:
        mine = self.group.slice_of(self._count)
        return {shard: Rank(shard, world_size=self._count).slice_of(count) for shard in mine}

    def backward(self, parts: Iterable[Part]) -> Tensor:
        passes = self._passes(parts)

        def known(node: range) -> Passed | None:
            return next(passes) if len(node) == 1 else None

        self._found.note()
        sums = [fold(node, known, add) for node in self._summing.mine]
        if self.group.rank.first:
            self._kept.rewind()
        if self._equal_buffers:
            self.group.sync_buffers(self.model)
        own = torch.stack([loss for one in sums for loss in one.losses])
        losses = own if self.group.size == 1 else self._exchange(sums)
        if self.group.size == 1:
            self._hand_out(sums[0].gradient)
        return self._told(own.double().sum(), losses.double().sum())

    def _passes(self, parts: Iterable[Part]) -> Iterator[Passed]:
        """Shard by shard; a further one is begun when it is asked for."""
        for shard, its_parts in itertools.groupby(parts, key=lambda part: part.slice):
            self._found.rewind()
            loss = torch.zeros((), dtype=torch.float64, device=self.group.device)
            for part in its_parts:
                found = self.objective.loss(self.module, part.batch)
                self.objective.backward(found if part.share == 1 else found * part.share)
                loss += found.detach() * part.count
            if shard == 0:
                self._kept.note()
            yield Passed(self._take(), [loss.to(self._kind)])

    def _take(self) -> Gradient:
        """What the passes left; the parameters are ready for the next ones."""
        found = [None if p.grad is None else p.grad.to(self._kind) for p in self._trained]
        for parameter in self._trained:
            parameter.grad = None
        return found

    def _exchange(self, sums: list[Passed]) -> Tensor:
        """From the gradients of this process's shards to that of the batch; returns the losses of all shards."""
        self.traffic.sent_bytes += self._summing.sent_bytes
        for row, node, one in zip(self._rows, self._summing.mine, sums, strict=True):
            row.fill(one, node)
        with self.stopwatch.waiting():
            self._summing.exchange()
        missing = [i for i, found in enumerate(sums[0].gradient) if found is None]
        lacking = {i for i in missing if self._total.there[i] == 0}  # only then is a GPU waited for
        self._hand_out([None if i in lacking else found for i, found in enumerate(self._total.gradient)])
        return self._total.losses

    def _cut(self, row: Tensor) -> Row:
        """Each gradient is laid out as its parameter is."""
        sizes = [parameter.numel() for parameter in self._trained]
        numbers = sum(sizes)
        pairs = zip(self._trained, torch.split(row[:numbers], sizes), strict=True)
        gradient = [part.as_strided(parameter.size(), parameter.stride()) for parameter, part in pairs]
        there, losses = torch.split(row[numbers:], [len(sizes), len(row) - numbers - len(sizes)])
        return Row(gradient, there, losses[: self._count])

    def _hand_out(self, gradient: Gradient) -> None:
        for parameter, found in zip(self._trained, gradient, strict=True):
            parameter.grad = None if found is None else found.to(parameter.dtype)

    def _told(self, own: Tensor, total: Tensor) -> Tensor:
        """The first process tells the loss of all, so that it is added up in one order; a loss that is not finite is
        told by the process that has it."""
        if self.group.rank.first:
            return torch.where(total.isfinite(), total, own)
        return torch.where(own.isfinite(), torch.zeros_like(own), own)


def add(left: Passed, right: Passed) -> Passed:
    """In place: what is added is not needed again."""
    pairs = [(a, b) for a, b in zip(left.gradient, right.gradient, strict=True) if a is not None and b is not None]
    if pairs:
        torch._foreach_add_([a for a, _ in pairs], [b for _, b in pairs])
    both = zip(left.gradient, right.gradient, strict=True)
    return Passed([_either(a, b) for a, b in both], left.losses + right.losses)


def _either(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """Where one is missing it counts as zeros, as in a row: a negative zero becomes a positive one."""
    if left is None and right is not None:
        return right.add_(0.0)
    return left.add_(0.0) if left is not None and right is None else left


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
