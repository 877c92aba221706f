"""The yardsticks: the loop a good engineer writes by hand, with the mathematics of ours and nothing else; and the same
loop tuned by hand, with the settings of the allocator, the garbage collector and DDP that ours has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.train.gate import Gate
from benchmarks.train.recipe import CLIP_NORM, LOG_EVERY, Plan, decay_groups
from benchmarks.train.workloads import Workload
from pipeline.contract.data import forward
from pipeline.system.processes import Rank
from train.optim import freeze_garbage_collector, tune_malloc

# As ours with gloo: one exchange of all gradients, from the memory they are computed in; a pass sends no buffers.
_DDP_OF_OURS = {"bucket_cap_mb": 1 << 20, "gradient_as_bucket_view": True, "broadcast_buffers": False}


def tuned(workload: Workload, rank: Rank, gate: Gate, folder: Path) -> None:
    tune_malloc()
    freeze_garbage_collector()
    bare(workload, rank, gate, folder, **_DDP_OF_OURS)


def bare(workload: Workload, rank: Rank, gate: Gate, folder: Path, **ddp: Any) -> None:
    if rank.world_size > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    task = workload.make()
    model = task.model()
    module: nn.Module = DistributedDataParallel(model, **ddp) if rank.world_size > 1 else model
    optimizer = torch.optim.AdamW(decay_groups(model), fused=True)
    module.train()
    with (folder / "log.txt").open("w") as log:
        plan = Plan(task, workload.batch_size, rank)
        for step, batch in enumerate(plan.batches()):
            if step % workload.lap == 0:
                gate()
            loss = task.loss(forward(module, task, batch), batch)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            for group in optimizer.param_groups:
                group["lr"] = plan.rate(step)
            optimizer.step()
            optimizer.zero_grad()
            if rank.first and step % LOG_EVERY == 0:
                log.write(f"{step} {loss.item()}\n")
                log.flush()


def padded(workload: Workload, rank: Rank, gate: Gate, folder: Path) -> None:
    """Train the bare loop on the texts of `workload`, one text per row."""
    from benchmarks.train.deepseek import Padded  # here: the other workloads do without a tokenizer

    bare(replace(workload, make=Padded), rank, gate, folder)
