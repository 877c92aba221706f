"""Our loop as `pipe run train` runs it: the Trainer with its journal, without the road around it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.train.gate import Gate
from benchmarks.train.lapping import Lapping
from benchmarks.train.recipe import train_section
from benchmarks.train.workloads import Workload
from pipeline.contract.config import parse_config
from pipeline.contract.data import open_split
from pipeline.contract.processes import Rank
from train.checkpoint.store import CheckpointStore
from train.metrics import Journal
from train.optim import be_deterministic, forget_what_lasts, keep_freed_memory
from train.process_group import Group, join
from train.state import Progress


def ours(
    workload: Workload,
    rank: Rank,
    gate: Gate,
    folder: Path,
    make_store: Callable[[Path, Group], CheckpointStore] | None = None,
    **words: Any,
) -> None:
    section = {**train_section(workload.batch_size), **words}
    body = {"name": "race", "task": "task.py:T", "codec": "codec.py:C", "train": section}
    config = parse_config(body, source="the race")
    be_deterministic(config.train)
    keep_freed_memory()
    with join(config.train, rank, folder) as group:
        task = workload.make()
        train = open_split(task, "train")
        trainer = Lapping(task, config, group, train, train, workload.batch_size)
        trainer.gate, trainer.lap = gate, workload.lap
        place = group.share(folder) / "checkpoints"
        store = make_store(place, group) if make_store else CheckpointStore(place, 2, {}, group)
        forget_what_lasts()
        if not rank.first:
            trainer.fit(Progress(), store, None)
            return
        with contextlib.closing(Journal(folder, 0)) as journal:
            trainer.fit(Progress(), store, journal)
