"""One process of the GPU table: `torchrun … -m benchmarks.train.on_gpu NET STEPS SETTINGS` trains on random samples.

SETTINGS are those of the section train, in JSON. The result is one line of JSON, and so is the reason of a failure.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.train.gate import Finished
from benchmarks.train.lapping import Lapping
from benchmarks.train.large import NETS
from pipeline.contract.config import parse_config
from pipeline.contract.data import open_split
from pipeline.system.processes import Rank
from train.checkpoint.store import CheckpointStore
from train.device.accelerator import configure_accelerator
from train.metrics import peak_memory_bytes
from train.optim import set_determinism
from train.process_group import ProcessGroup, join_process_group
from train.state import Progress

LAP, WARM_LAPS = 5, 2


class Stopwatch:
    """Times whole laps, with the GPU's work done, and ends the run after the last."""

    def __init__(self, laps: int, device: torch.device) -> None:
        self._left, self._started, self._on_gpu = laps + WARM_LAPS + 1, 0.0, device.type == "cuda"
        self.seconds: list[float] = []

    def __call__(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()
        now, self._left = time.perf_counter(), self._left - 1
        self.seconds.append(now - self._started)
        self._started = now
        if self._left == 0:
            raise Finished


def main(net: str, steps: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Train for some steps and return what was measured."""
    rank, task = Rank.from_env(), NETS[net].make()
    on_gpu = settings["device"] == "cuda"
    memory = torch.cuda.get_device_properties(rank.local_rank).total_memory if on_gpu else 0
    batch_size = NETS[net].batch_size(memory) * rank.world_size
    body = {"name": "bench", "task": "t.py:T", "codec": "c.py:C", "train": {**settings, "batch_size": batch_size}}
    config = parse_config(body, source="the bench")
    set_determinism(config.train)
    with tempfile.TemporaryDirectory() as folder, join_process_group(config.train, rank, Path(folder)) as group:
        configure_accelerator(config.train, group.device)
        train = open_split(task, "train")
        trainer = Lapping(task, config, group, train, train, batch_size)
        watch = Stopwatch(-(-steps // LAP), group.device)
        trainer.gate, trainer.lap = watch, LAP
        try:
            trainer.fit(Progress(), CheckpointStore(Path(folder), 1, {}, group), None)  # no epoch ends in a few steps
        except Finished:
            samples_per_second = batch_size * LAP / statistics.median(watch.seconds[WARM_LAPS + 1 :])
        return {
            **describe_device(group),
            "batch_size": batch_size,
            "per_second": samples_per_second * NETS[net].units_per_sample,
            "mfu": trainer.flops.utilization(samples_per_second) if trainer.flops else None,
            "memory_gb": peak_memory_bytes(group.device) / 2**30,
        }


def describe_device(group: ProcessGroup) -> dict[str, Any]:
    if group.device.type != "cuda":
        return {"device": "CPU", "capability": 0}
    name, (capability, _) = torch.cuda.get_device_name(group.device), torch.cuda.get_device_capability(group.device)
    return {"device": name, "capability": capability}


def reason(error: Exception) -> str:
    """Return the first line of an error, which torch continues with advice and traces."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}"


if __name__ == "__main__":
    status = 0
    try:
        result = main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
    except Exception as error:
        status, result = 1, {"failed": reason(error)}
        sys.excepthook(*sys.exc_info())
    if status or Rank.from_env().first:
        print(json.dumps(result), flush=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
