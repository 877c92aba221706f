"""Checkpoint shards: which process writes which part of a state, and a copy of it that training cannot change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from pipeline.system.torch_private import foreach_copy_
from train.checkpoint.format import Chunk, Layout, make_layout
from train.state import Shape, local_shard


class CheckpointShard:
    """The part of the state that this process writes: one buffer with the layout of its file, used for every save."""

    def __init__(self, tensors: Mapping[str, Tensor], layout: Layout) -> None:
        self._shapes = tensor_shapes(tensors)
        self._pinned = any(tensor.is_cuda for tensor in tensors.values())
        self._memory = torch.empty(layout.bytes, dtype=torch.uint8, pin_memory=self._pinned)
        self._memory[: len(layout.header)] = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
        self._names = [span.chunk.name for span in layout.spans]
        self._buffers = [
            self._memory[span.start : span.start + span.chunk.bytes].view(span.chunk.dtype).view(span.chunk.sizes)
            for span in layout.spans
        ]

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether a state has the shapes and types that the shard was planned for."""
        return self._shapes == tensor_shapes(tensors)

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> memoryview:
        """Copy the state into the buffer and return it, ready to be written; it is valid until the next copy."""
        sources = [local_shard(tensors[name]) for name in self._names]
        if sources:  # there may be fewer tensors than processes
            foreach_copy_(self._buffers, sources, non_blocking=self._pinned)
        if self._pinned:
            torch.cuda.current_stream().synchronize()
        return self._memory.numpy().data


def plan_shard(tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> CheckpointShard:
    """Plan with all processes who writes what; replicated tensors are divided, so that all write about as much.

    torch's planner decides. A plan for 400 tensors takes some 75 ms, so it is made once, and again only when shapes
    change; `torch.distributed.checkpoint.save` would make it for every checkpoint.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=group is None or dist.get_rank(group) == 0)
    plan = _make_global_plan(planner, planner.create_local_plan(), group)
    return CheckpointShard(tensors, make_layout(_chunk(item) for item in plan.items))


def tensor_shapes(tensors: Mapping[str, Tensor]) -> dict[str, Shape]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def _make_global_plan(planner: DefaultSavePlanner, local: SavePlan, group: dist.ProcessGroup | None) -> SavePlan:
    """Return this process's part of the plan, which the first process makes from all local plans."""
    if group is None:
        return planner.create_global_plan([local])[0][0]
    is_first, world_size = dist.get_rank(group) == 0, dist.get_world_size(group)
    local_plans: list[Any] | None = [None] * world_size if is_first else None
    dist.gather_object(local, local_plans, dst=0, group=group)
    global_plans = planner.create_global_plan(local_plans)[0] if local_plans else None
    received: list[Any] = [None]
    dist.scatter_object_list(received, global_plans, src=0, group=group)
    plan: SavePlan = received[0]
    return plan


def _chunk(item: WriteItem) -> Chunk:
    data = item.tensor_data
    assert data is not None, "a state has nothing but tensors"
    box = data.chunk
    return Chunk(item.index.fqn, data.properties.dtype, tuple(data.size), tuple(box.offsets), tuple(box.sizes))
