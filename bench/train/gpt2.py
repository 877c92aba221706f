"""One process of the GPU table: `torchrun … -m bench.train.gpt2 STEPS` trains a GPT-2 on random tokens."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from bench.train.gate import Finished
from bench.train.lapping import Lapping
from bench.train.transformer import Transformer
from bench.train.workloads import Synthetic
from pipeline.spec.config import parse_config
from pipeline.spec.data import open_split
from pipeline.spec.rank import Rank
from train.checkpoint import CheckpointStore
from train.group import Group, join
from train.state import Progress

VOCABULARY, WIDTH, HEADS, DEPTH, LENGTH = 50304, 768, 12, 12, 1024
LAP, WARM_LAPS = 5, 2

# Dense bf16 in TFLOP/s, from the makers' data sheets; the longest name that fits counts.
PEAKS = {"A100": 312, "H100": 989, "H100 PCIe": 756, "H200": 989, "B200": 2250, "L4": 121, "L40S": 362, "A10": 125}


class Gpt2(Synthetic):
    def model(self) -> nn.Module:
        return Transformer(VOCABULARY, WIDTH, HEADS, DEPTH, LENGTH)

    def data(self, split: str) -> dict[str, Tensor]:
        text = torch.randint(VOCABULARY, (1 << 14, LENGTH + 1), generator=torch.Generator().manual_seed(len(split)))
        return {"x": text[:, :-1].contiguous(), "target": text[:, 1:].contiguous()}


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


def sequences(memory_bytes: int) -> int:
    """In a batch of one GPU: what fits beside 124 million parameters and the scores of every token."""
    return next((count for count, gigabytes in ((32, 70), (16, 40), (8, 20)) if memory_bytes >= gigabytes << 30), 4)


def flops_per_token(parameters: int) -> float:
    """Six for each parameter, forward and backward, and what attention does between the tokens."""
    return 6 * parameters + 12 * DEPTH * WIDTH * LENGTH


def peak_flops(device: str) -> float | None:
    known = [name for name in PEAKS if set(name.split()) <= set(device.replace("-", " ").split())]
    return PEAKS[max(known, key=len)] * 1e12 if known else None


def main(steps: int) -> None:
    rank = Rank.from_env()
    batch_size = sequences(torch.cuda.get_device_properties(rank.local_rank).total_memory) * rank.world_size
    words = {"batch_size": batch_size, "precision": "bf16", "compile": True, "device": "cuda", "checkpoint_every": 0}
    body = {"name": "gpt2", "task": "task.py:T", "codec": "codec.py:C", "train": {**words, "deterministic": False}}
    config = parse_config(body, source="the bench")
    with tempfile.TemporaryDirectory() as folder, join(config.train, rank, Path(folder)) as group:
        task = Gpt2()
        train = open_split(task, "train")
        trainer = Lapping(task, config, group, train, train, batch_size)
        watch = Stopwatch(-(-steps // LAP))
        trainer.gate, trainer.lap = watch, LAP
        try:
            trainer.fit(Progress(), CheckpointStore(Path(folder), 1, {}, group), None)  # no epoch ends in a few steps
        except Finished:
            _tell(watch, trainer.strategy.model, batch_size, group)


def _tell(watch: Stopwatch, model: nn.Module, batch_size: int, group: Group) -> None:
    tokens = batch_size * LENGTH * LAP / statistics.median(watch.seconds[WARM_LAPS + 1 :])
    device = torch.cuda.get_device_name(group.device)
    peak = peak_flops(device)
    flops = tokens * flops_per_token(sum(parameter.numel() for parameter in model.parameters()))
    row = {
        "gpus": group.size,
        "device": device,
        "batch_size": batch_size,
        "tokens_per_second": tokens,
        "mfu": flops / peak / group.size if peak else None,
        "memory_gb": torch.cuda.max_memory_allocated(group.device) / 2**30,
    }
    if group.rank.first:
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)
