"""Deterministic data parallelism (`elastic_shards`): the same bits with any number of processes.

Neither how a batch is split nor the order in which gradients are added depends on the number of processes: a batch is
split into numbered shards, and their gradients are added along a fixed binary tree over the shards, whichever
processes compute them.
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

from pipeline.system.errors import ConfigError
from pipeline.system.processes import Rank
from pipeline.system.torch_private import foreach_add_, foreach_copy_
from train.parallel.base import MicroBatch, Strategy
from train.parallel.ddp import BufferSnapshot, has_only_running_statistics
from train.process_group import ProcessGroup

Gradient = list[Tensor | None]  # of each trained parameter; None: no pass used it


class DeterministicStrategy(Strategy):
    """A batch is split into `elastic_shards` shards, and each process computes some consecutive ones in turn.

    The random numbers of a pass, its micro-batches and the buffers it starts from depend on its shard alone. The
    buffers after shard 0 are kept, as those of rank 0 are in DDP.
    """

    def wrap_model(self) -> nn.Module:
        self._shard_count = self.config.elastic_shards
        if self.group.size > self._shard_count:
            raise ConfigError(
                f"train.elastic_shards={self._shard_count}: {self.group.size} processes leave some without work; "
                f"set train.elastic_shards={self.group.size}, which gives other bits, or use fewer processes"
            )
        self.group.broadcast((*self.model.parameters(), *self.model.buffers()))
        self._trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._dtype = functools.reduce(torch.promote_types, [p.dtype for p in self._trained], torch.float32)
        width = sum(parameter.numel() for parameter in self._trained) + len(self._trained) + self._shard_count
        self._reduction = DeterministicAllReduce(self.group, self._shard_count, width, self._dtype)
        self._rows = [self._view(row) for row in self._reduction.rows]
        self._total = self._view(self._reduction.total)
        self._sync_buffers = not has_only_running_statistics(self.model)  # training passes read them
        self._buffers_before = BufferSnapshot(self.model)
        self._buffers_after_shard_0 = BufferSnapshot(self.model)
        return super().wrap_model()

    def slices(self, count: int) -> dict[int, range]:
        own_shards = self.group.slice_of(self._shard_count)
        return {shard: Rank(shard, world_size=self._shard_count).slice_of(count) for shard in own_shards}

    def compute_gradient(self, micro_batches: Iterable[MicroBatch]) -> Tensor:
        shard_sums = self._compute_shards(micro_batches)

        def next_shard(node: range) -> PartialSum | None:
            return next(shard_sums) if len(node) == 1 else None

        self._buffers_before.take()
        sums = [tree_sum(node, next_shard, add) for node in self._reduction.own_nodes]
        if self.group.rank.first:
            self._buffers_after_shard_0.restore()
        if self._sync_buffers:
            self.group.broadcast(self.model.buffers())
        own_losses = torch.stack([loss for partial in sums for loss in partial.losses])
        losses = own_losses if self.group.size == 1 else self._reduce(sums)
        if self.group.size == 1:
            self._set_gradients(sums[0].gradient)
        return self._reported_loss(own_losses.double().sum(), losses.double().sum())

    def _compute_shards(self, micro_batches: Iterable[MicroBatch]) -> Iterator[PartialSum]:
        """Yield the sum of each shard; the next one is computed only when it is needed."""
        for shard, shard_batches in itertools.groupby(micro_batches, key=lambda micro_batch: micro_batch.slice):
            self._buffers_before.restore()
            total = torch.zeros((), dtype=torch.float64, device=self.group.device)
            for micro_batch in shard_batches:
                loss = self.objective.loss(self.module, micro_batch.columns)
                self.objective.backward(loss * micro_batch.fraction)
                total += loss.detach().double() * micro_batch.fraction
            if shard == 0:
                self._buffers_after_shard_0.take()
            yield PartialSum(self._take_gradients(), [total.to(self._dtype)])

    def _take_gradients(self) -> Gradient:
        """Return the gradients of the last passes and clear those of the parameters."""
        gradient = [None if p.grad is None else p.grad.to(self._dtype) for p in self._trained]
        for parameter in self._trained:
            parameter.grad = None
        return gradient

    def _reduce(self, sums: list[PartialSum]) -> Tensor:
        """Turn the sums over this process's shards into the gradient of the batch; return the losses of all shards."""
        self.traffic.sent_bytes += self._reduction.sent_bytes
        for row, node, partial in zip(self._rows, self._reduction.own_nodes, sums, strict=True):
            row.fill(partial, node)
        with self.stopwatch.waiting():
            self._reduction.all_reduce()
        missing_here = [i for i, gradient in enumerate(sums[0].gradient) if gradient is None]
        missing = {i for i in missing_here if self._total.is_present[i] == 0}  # waits for a GPU only if any is
        self._set_gradients([None if i in missing else g for i, g in enumerate(self._total.gradient)])
        return self._total.losses

    def _view(self, row: Tensor) -> FlatSum:
        """Return views of a row; each gradient has the memory layout of its parameter."""
        sizes = [parameter.numel() for parameter in self._trained]
        numbers = sum(sizes)
        pairs = zip(self._trained, torch.split(row[:numbers], sizes), strict=True)
        gradient = [values.as_strided(parameter.size(), parameter.stride()) for parameter, values in pairs]
        is_present, losses = torch.split(row[numbers:], [len(sizes), len(row) - numbers - len(sizes)])
        return FlatSum(gradient, is_present, losses[: self._shard_count])

    def _set_gradients(self, gradients: Gradient) -> None:
        for parameter, gradient in zip(self._trained, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype)

    def _reported_loss(self, own_loss: Tensor, total: Tensor) -> Tensor:
        """Return the loss that this process reports; the trainer adds up those of all processes.

        The first process reports the loss of all, so that it is added up in one order. A loss that is not finite is
        reported by the process that has it.
        """
        if self.group.rank.first:
            return torch.where(total.isfinite(), total, own_loss)
        return torch.where(own_loss.isfinite(), torch.zeros_like(own_loss), own_loss)


@dataclass
class PartialSum:
    """Gradients and losses, summed over some consecutive shards."""

    gradient: Gradient
    losses: list[Tensor]  # each shard's part of the loss of the global batch


@dataclass(frozen=True)
class FlatSum:
    """A partial sum as one row of numbers, ready to be sent: views of the row."""

    gradient: list[Tensor]
    is_present: Tensor  # for each parameter: 0 if no shard has a gradient
    losses: Tensor  # of all shards

    def fill(self, partial: PartialSum, node: range) -> None:
        self.is_present.fill_(1)
        for i, gradient in enumerate(partial.gradient):
            if gradient is None:
                self.gradient[i].zero_()
                self.is_present[i] = 0
        pairs = [(out, g) for out, g in zip(self.gradient, partial.gradient, strict=True) if g is not None]
        if pairs:
            foreach_copy_([out for out, _ in pairs], [gradient for _, gradient in pairs])
        self.losses.zero_()
        self.losses[node.start : node.stop] = torch.stack(partial.losses)


def add(left: PartialSum, right: PartialSum) -> PartialSum:
    """Add two sums in place: neither is needed again."""
    pairs = [(a, b) for a, b in zip(left.gradient, right.gradient, strict=True) if a is not None and b is not None]
    if pairs:
        foreach_add_([a for a, _ in pairs], [b for _, b in pairs])
    gradients = zip(left.gradient, right.gradient, strict=True)
    return PartialSum([_first_present(a, b) for a, b in gradients], left.losses + right.losses)


def _first_present(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """Return the sum where one may be missing; it counts as zeros, so a negative zero becomes a positive one."""
    if left is None and right is not None:
        return right.add_(0.0)
    return left.add_(0.0) if left is not None and right is None else left


# torch 2.13 renamed this function, and warns about the old name.
_all_gather: Callable[[Tensor, Tensor], object] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class DeterministicAllReduce:
    """An all-reduce whose order of additions is a fixed binary tree over shards.

    A process contributes one row for every tree node that it has computed as a whole. Each process adds up a slice of
    the columns and sends it to all: the same bytes as a ring all-reduce.
    """

    def __init__(self, group: ProcessGroup, shards: int, width: int, dtype: torch.dtype) -> None:
        self._root = range(shards)
        shards_by_rank = [Rank(rank, world_size=group.size).slice_of(shards) for rank in range(group.size)]
        self._nodes_by_rank = [covering_nodes(self._root, own) for own in shards_by_rank]
        self.own_nodes = self._nodes_by_rank[group.rank.rank]
        self._columns, self._size = -(-width // group.size), group.size
        padded_width, device = self._columns * group.size, group.device
        # To be filled, one per node.
        self.rows = torch.zeros(len(self.own_nodes), padded_width, dtype=dtype, device=device)
        self._received = torch.zeros(sum(map(len, self._nodes_by_rank)), self._columns, dtype=dtype, device=device)
        self.total = torch.zeros(padded_width, dtype=dtype, device=device)

    @property
    def sent_bytes(self) -> int:
        """Return the bytes that this process sends in each all-reduce."""
        return (self.rows.numel() + self._columns) * self.rows.element_size()

    def all_reduce(self) -> None:
        """Add up the `rows` of all processes into `total`."""
        count = len(self.own_nodes)
        by_process = self.rows.view(count, self._size, self._columns).transpose(0, 1).contiguous()
        dist.all_to_all_single(
            self._received.view(-1),
            by_process.view(-1),
            output_split_sizes=[len(nodes) * self._columns for nodes in self._nodes_by_rank],
            input_split_sizes=[count * self._columns] * self._size,
        )
        received = dict(zip((node for nodes in self._nodes_by_rank for node in nodes), self._received, strict=True))
        _all_gather(self.total, tree_sum(self._root, received.get, Tensor.add_))


Summand = TypeVar("Summand")


def covering_nodes(node: range, shards: range) -> list[range]:
    """Return the largest tree nodes below `node` that lie wholly within `shards`, in order."""
    if shards.start <= node.start and node.stop <= shards.stop:
        return [node]
    if node.stop <= shards.start or shards.stop <= node.start:
        return []
    return [covering for half in halves(node) for covering in covering_nodes(half, shards)]


def tree_sum(
    node: range, lookup: Callable[[range], Summand | None], add: Callable[[Summand, Summand], Summand]
) -> Summand:
    """Return the sum of a node: from `lookup`, or else of its halves. Nodes are looked up from left to right."""
    value = lookup(node)
    if value is not None:
        return value
    left, right = halves(node)
    left_sum = tree_sum(left, lookup, add)
    return add(left_sum, tree_sum(right, lookup, add))


def halves(node: range) -> tuple[range, range]:
    middle = (node.start + node.stop) // 2
    return range(node.start, middle), range(middle, node.stop)
