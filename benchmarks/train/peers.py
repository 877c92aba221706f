"""The same training by Lightning Fabric, the Lightning Trainer and Accelerate, each as its own guide writes it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.train.gate import Gate
from benchmarks.train.recipe import CLIP_NORM, Plan, decay_groups
from benchmarks.train.workloads import Workload
from pipeline.system.processes import Rank

# They write no log at all, and get batches from memory as ours and the bare loop do: only the loop is compared.


def fabric(workload: Workload, rank: Rank, gate: Gate, folder: Path) -> None:  # noqa: ARG001
    from lightning.fabric import Fabric

    runtime = Fabric(accelerator="cpu", devices=rank.world_size, strategy="ddp" if rank.world_size > 1 else "auto")
    runtime.launch()
    runtime.seed_everything(0, verbose=False)
    task = workload.make()
    plan, raw = Plan(task, workload.batch_size, rank), task.model()
    model, optimizer = runtime.setup(raw, torch.optim.AdamW(decay_groups(raw), fused=True))
    model.train()
    for step, batch in enumerate(plan.batches()):
        if step % workload.lap == 0:
            gate()
        runtime.backward(task.loss(model(*[batch[name] for name in task.inputs]), batch))
        runtime.clip_gradients(model, optimizer, max_norm=CLIP_NORM)
        _set_rate(optimizer, plan.rate(step))
        optimizer.step()
        optimizer.zero_grad()


def accelerate(workload: Workload, rank: Rank, gate: Gate, folder: Path) -> None:  # noqa: ARG001
    os.environ["ACCELERATE_USE_CPU"] = "true"
    if rank.world_size > 1:
        dist.init_process_group("gloo")
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    task = workload.make()
    plan, raw = Plan(task, workload.batch_size, rank), task.model()
    model, optimizer = accelerator.prepare(raw, torch.optim.AdamW(decay_groups(raw), fused=True))
    model.train()
    for step, batch in enumerate(plan.batches()):
        if step % workload.lap == 0:
            gate()
        accelerator.backward(task.loss(model(*[batch[name] for name in task.inputs]), batch))
        accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
        _set_rate(optimizer, plan.rate(step))
        optimizer.step()
        optimizer.zero_grad()


def lightning(workload: Workload, rank: Rank, gate: Gate, folder: Path) -> None:
    from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

    seed_everything(0, verbose=False)
    task = workload.make()
    plan = Plan(task, workload.batch_size, rank)

    class Module(LightningModule):  # type: ignore[misc]  # mypy is not run where the peers are
        def __init__(self) -> None:
            super().__init__()
            self.model: nn.Module = task.model()

        def training_step(self, batch: Mapping[str, Tensor], _index: int) -> Tensor:
            return task.loss(self.model(*[batch[name] for name in task.inputs]), batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(decay_groups(self.model), fused=True)

    class Laps(Callback):  # type: ignore[misc]
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
            if batch_idx % workload.lap == 0:
                gate()
            _set_rate(trainer.optimizers[0], plan.rate(batch_idx))

    trainer = Trainer(
        accelerator="cpu",
        devices=rank.world_size,
        strategy="ddp" if rank.world_size > 1 else "auto",
        max_epochs=1,
        gradient_clip_val=CLIP_NORM,
        callbacks=[Laps()],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(Module(), DataLoader(_Batches(plan), batch_size=None))


class _Batches(IterableDataset[dict[str, Tensor]]):
    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def __iter__(self) -> Any:
        return self._plan.batches()


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
