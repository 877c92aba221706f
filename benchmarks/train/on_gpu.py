"""One process of the GPU table: `torchrun … -m benchmarks.train.on_gpu NET STEPS COMPILE` trains on random tokens."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.train.gate import Finished
from benchmarks.train.lapping import Lapping
from benchmarks.train.large import LENGTH, NETS, sequences
from pipeline.contract.config import parse_config
from pipeline.contract.data import open_split
from pipeline.contract.processes import Rank
from train.checkpoint.store import CheckpointStore
from train.flops import ModelFlops
from train.process_group import ProcessGroup, join_process_group
from train.state import Progress

LAP, WARM_LAPS = 5, 2


class Stopwatch:
    """Times whole laps, with the GPU's work done, and ends the run after the last."""

    def __init__(self, laps: int) -> None:
        self._left, self._started = laps + WARM_LAPS + 1, 0.0
        self.seconds: list[float] = []

    def __call__(self) -> None:
        torch.cuda.synchronize()
        now, self._left = time.perf_counter(), self._left - 1
        self.seconds.append(now - self._started)
        self._started = now
        if self._left == 0:
            raise Finished


def main(net: str, steps: int, *, compiled: bool) -> None:
    rank = Rank.from_env()
    batch_size = sequences(torch.cuda.get_device_properties(rank.local_rank).total_memory) * rank.world_size
    settings = {
        "batch_size": batch_size,
        "precision": "bf16",
        "compile": compiled,
        "device": "cuda",
        "checkpoint_every": 0,
    }
    body = {"name": "bench", "task": "task.py:T", "codec": "codec.py:C", "train": {**settings, "deterministic": False}}
    config = parse_config(body, source="the bench")
    with tempfile.TemporaryDirectory() as folder, join_process_group(config.train, rank, Path(folder)) as group:
        task = NETS[net].make()
        train = open_split(task, "train")
        trainer = Lapping(task, config, group, train, train, batch_size)
        watch = Stopwatch(-(-steps // LAP))
        trainer.gate, trainer.lap = watch, LAP
        try:
            trainer.fit(Progress(), CheckpointStore(Path(folder), 1, {}, group), None)  # no epoch ends in a few steps
        except Finished:
            _print_row(watch, trainer.flops, batch_size, group)


def _print_row(watch: Stopwatch, flops: ModelFlops | None, batch_size: int, group: ProcessGroup) -> None:
    samples = batch_size * LAP / statistics.median(watch.seconds[WARM_LAPS + 1 :])  # per second
    row = {
        "gpus": group.size,
        "device": torch.cuda.get_device_name(group.device),
        "batch_size": batch_size,
        "tokens_per_second": samples * LENGTH,
        "mfu": flops.utilization(samples) if flops else None,
        "memory_gb": torch.cuda.max_memory_allocated(group.device) / 2**30,
    }
    if group.rank.first:
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), compiled=sys.argv[3] == "1")
    sys.stdout.flush()
    os._exit(0)
