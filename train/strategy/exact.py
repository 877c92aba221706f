"""`elastic: exact`: the same bits with any number of processes, since neither cuts nor sums depend on it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.spec.errors import ConfigError
from pipeline.spec.rank import Rank
from pipeline.spec.sections import Train
from train.group import Group
from train.objective import Objective
from train.strategy.alone import Alone, Part
from train.strategy.buffers import Rewinding, only_statistics
from train.strategy.summing import Summing
from train.strategy.tree import fold

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


class Exact(Alone):
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
