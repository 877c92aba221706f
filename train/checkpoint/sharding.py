"""Who writes what of a state, and a copy of this process's share that training cannot change any more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from train.checkpoint.format import Chunk, Layout, lay_out
from train.parallel.gradients import local

Shape = tuple[torch.Size, torch.dtype]


class Share:
    """What this process writes, in one piece of memory that is laid out as its file and used again and again."""

    def __init__(self, tensors: Mapping[str, Tensor], layout: Layout) -> None:
        self._shapes = shapes_of(tensors)
        self._pinned = any(tensor.is_cuda for tensor in tensors.values())
        self._memory = torch.empty(layout.bytes, dtype=torch.uint8, pin_memory=self._pinned)
        self._memory[: len(layout.header)] = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
        self._names = [span.chunk.name for span in layout.spans]
        self._places = [
            self._memory[span.start : span.start + span.chunk.bytes].view(span.chunk.dtype).view(span.chunk.sizes)
            for span in layout.spans
        ]

    @property
    def bytes(self) -> int:
        return len(self._memory)

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether a state is one like that which was shared out."""
        return self._shapes == shapes_of(tensors)

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> memoryview:
        """A copy of the state as it is, ready to be written; it holds until the next one is taken."""
        sources = [local(tensors[name]) for name in self._names]
        if sources:  # there may be fewer tensors than processes
            torch._foreach_copy_(self._places, sources, non_blocking=self._pinned)
        if self._pinned:
            torch.cuda.current_stream().synchronize()
        return self._memory.numpy().data


def share_out(tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> Share:
    """All take part. What several processes hold is written by one of them, so that all write about as much.

    torch's planner decides. Its plan for 400 tensors takes some 75 ms, so it is made once, and again only when a state
    looks different: `torch.distributed.checkpoint.save` would make it for every checkpoint.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=group is None or dist.get_rank(group) == 0)
    plan = _agree(planner, planner.create_local_plan(), group)
    return Share(tensors, lay_out(_chunk(item) for item in plan.items))


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, Shape]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def _agree(planner: DefaultSavePlanner, mine: SavePlan, group: dist.ProcessGroup | None) -> SavePlan:
    """The first process makes one plan of everybody's."""
    if group is None:
        return planner.create_global_plan([mine])[0][0]
    first, size = dist.get_rank(group) == 0, dist.get_world_size(group)
    plans: list[Any] | None = [None] * size if first else None
    dist.gather_object(mine, plans, dst=0, group=group)
    chosen = planner.create_global_plan(plans)[0] if plans else None
    found: list[Any] = [None]
    dist.scatter_object_list(found, chosen, src=0, group=group)
    plan: SavePlan = found[0]
    return plan


def _chunk(item: WriteItem) -> Chunk:
    written = item.tensor_data
    assert written is not None, "a state holds nothing but tensors"
    box = written.chunk
    return Chunk(item.index.fqn, written.properties.dtype, tuple(written.size), tuple(box.offsets), tuple(box.sizes))
