"""Run functions in several real processes with a gloo group: cheaper than a whole train step for each case."""

from __future__ import annotations

import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.contract.config import parse_config
from pipeline.contract.data import Samples
from pipeline.system.processes import Rank
from train.batch_order import BatchOrder
from train.checkpoint.store import CheckpointStore
from train.parameter_server import ParameterServerTrainer
from train.process_group import ProcessGroup
from train.state import Progress
from train.trainer import Trainer

from ..fork_server import fork_context

Found = TypeVar("Found")


class Wave:
    """Learns a sine from samples that no batch divides; smooth everywhere, and noisy through dropout."""

    inputs = ("x",)
    outputs = ("y",)

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(3, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 1)
        )

    def data(self, split: str) -> dict[str, Any]:
        x = np.random.default_rng(len(split)).normal(size=(149 if split == "train" else 61, 3)).astype(np.float32)
        return {"x": x, "target": np.sin(x.sum(axis=1, keepdims=True) / 2)}

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.mse_loss(outputs, batch["target"])

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"closeness": -(outputs - batch["target"]).abs()[:, 0]}


def trainer(
    group: ProcessGroup,
    task: Any = None,
    order: BatchOrder | None = None,
    build: Any = None,
    resumes: bool = False,
    **train: Any,
) -> Trainer:
    """Return a trainer of 8 epochs with 10 steps each by default; `build` replaces the task's model()."""
    task, words = task or Wave(), {"epochs": 8, "batch_size": 15, "lr": 0.02, "device": "cpu", **train}
    config = parse_config({"name": "x", "task": "t.py:T", "codec": "c.py:C", "train": words}, source="test")
    group = replace(group, model_size=config.train.tensor_parallel * config.train.pipeline_parallel)
    splits = Samples("train", task.data("train")), Samples("validation", task.data("validation"))
    kind = ParameterServerTrainer if config.train.strategy == "parameter_server" and group.size > 1 else Trainer
    return kind(task, config, group, *splits, words["batch_size"], build, order, resumes)


def trained(group: ProcessGroup, directory: Path, **train: Any) -> tuple[Trainer, Progress]:
    made = trainer(group, **train)
    return made, made.fit(Progress(), CheckpointStore(directory, 99, {}, group), None)


def resumed(group: ProcessGroup, directory: Path, step: int, **train: Any) -> tuple[Trainer, Progress]:
    """Resume from a checkpoint of `trained`, as a new process does."""
    made, store = trainer(group, resumes=True, **train), CheckpointStore(directory, 99, {}, group)
    saved = store.load(step)
    made.restore(saved)
    return made, made.fit(saved.progress, store, None)


def weights(made: Trainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in made.strategy.model.state_dict().items()}


def run_distributed(
    work: Callable[..., Found], size: int, *arguments: Any, seconds: float = 300, lost: Collection[int] = ()
) -> list[Found]:
    """Run `work(group, *arguments)`, a module-level function, in every process, and return the results.

    The ranks in `lost` do not return, and are not waited for.
    """
    context = fork_context()
    with tempfile.TemporaryDirectory() as directory:
        started = []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_join, args=(theirs, f"{directory}/meet", rank, size, work, arguments, not lost)
            )
            process.start()
            theirs.close()
            started.append((process, ours))
        deadline = time.monotonic() + seconds
        try:
            received = [
                _receive(connection, deadline) for rank, (_, connection) in enumerate(started) if rank not in lost
            ]
        finally:
            for process, _ in started:
                process.kill()
                process.join()
    failed = [found for done, found in received if not done]
    assert not failed, "\n".join(failed)
    return [found for _, found in received]


def _receive(connection: Connection, deadline: float) -> tuple[bool, Any]:
    """Return what a process returned, or raise its error."""
    if not connection.poll(max(0.0, deadline - time.monotonic())):
        return False, "no answer in time"
    try:
        found: tuple[bool, Any] = pickle.loads(connection.recv_bytes())
        return found
    except EOFError:
        return False, "ended without an answer"


def _join(
    answer: Connection,
    meeting: str,
    rank: int,
    size: int,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
    leave_together: bool,
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=timedelta(seconds=300)
        )
        answered, found = True, work(ProcessGroup(Rank(rank, rank, size), torch.device("cpu")), *arguments)
        if leave_together:
            dist.barrier()
    except Exception:
        answered, found = False, f"rank {rank}:\n{traceback.format_exc()}"
    answer.send_bytes(pickle.dumps((answered, found)))
    os._exit(0)  # freeing what gloo holds may never return
