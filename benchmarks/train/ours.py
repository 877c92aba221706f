"""Our loop as `pipe run train` runs it: the Trainer with its journal and ledger, without the rest of the pipeline."""

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
from pipeline.system.files import write_json
from pipeline.system.processes import Rank
from train.checkpoint.store import CheckpointStore
from train.ledger import Ledger
from train.metrics import MetricsLog
from train.optim import freeze_garbage_collector, set_determinism, tune_malloc
from train.process_group import ProcessGroup, join_process_group
from train.sample_checksums import read_checksums, write_checksums
from train.state import Progress


def ours(
    workload: Workload,
    rank: Rank,
    gate: Gate,
    folder: Path,
    make_store: Callable[[Path, ProcessGroup], CheckpointStore] | None = None,
    **settings: Any,
) -> None:
    section = {**train_section(workload.batch_size), **settings}
    body = {"name": "race", "task": "task.py:T", "codec": "codec.py:C", "train": section}
    config = parse_config(body, source="the race")
    set_determinism(config.train)
    tune_malloc()
    with join_process_group(config.train, rank, folder) as group:
        task = workload.make()
        train = open_split(task, "train")
        trainer = Lapping(task, config, group, train, train, workload.batch_size)
        trainer.gate, trainer.lap = gate, workload.lap
        checkpoints = group.share(folder) / "checkpoints"
        store = make_store(checkpoints, group) if make_store else CheckpointStore(checkpoints, 2, {}, group)
        records = group.share(folder)
        if rank.first:
            write_json(records / "data.json", write_checksums(train, records))
        group.share(None)  # only now the others read it
        ledger = Ledger(records, group, trainer.order, 0, attempt=1, checksums=read_checksums(records))
        freeze_garbage_collector()
        if not rank.first:
            trainer.fit(Progress(), store, None, ledger=ledger)
            return
        with contextlib.closing(MetricsLog(folder, 0)) as journal:
            trainer.fit(Progress(), store, journal, ledger=ledger)
