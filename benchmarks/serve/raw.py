"""`python -m benchmarks.serve.raw MODEL.onnx THREADS SECONDS ROWS…`: the bare runtime, no service around it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime


@dataclass(frozen=True)
class Speed:
    """Of the bare runtime, with so many rows in a batch."""

    rows: int
    per_second: float  # rows
    run_ms: float  # of one batch
    cpu_us: float  # for each row


def best(model: Path, threads: int, seconds: float, rows: Sequence[int]) -> Speed:
    """Return the speed at the best batch size, measured in a separate process like every contender."""
    argv = [sys.executable, "-m", "benchmarks.serve.raw", str(model), str(threads), str(seconds), *map(str, rows)]
    result = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60 + 10 * seconds * len(rows))
    return max((Speed(*speed) for speed in json.loads(result.stdout)), key=lambda speed: speed.per_second)


def main(argv: Sequence[str]) -> None:
    model, threads, seconds = argv[0], int(argv[1]), float(argv[2])
    speeds = []
    for spinning in "10":  # alone on the machine it gains, in company it costs
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.add_session_config_entry("session.intra_op.allow_spinning", spinning)
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        speeds += [_speed(session, int(rows), seconds / 2) for rows in argv[3:]]
        del session
    print(json.dumps([astuple(speed) for speed in speeds]))


def _speed(session: Any, rows: int, seconds: float) -> Speed:
    source = session.get_inputs()[0]
    kind = np.int64 if source.type == "tensor(int64)" else np.float32
    batch = {source.name: np.ones((rows, *source.shape[1:]), kind)}
    for _ in range(3):
        session.run(None, batch)
    runs, took, began, cpu = 0, 0.0, time.perf_counter(), time.process_time()
    while took < seconds:  # at least once, however busy the machine is
        session.run(None, batch)
        runs, took = runs + 1, time.perf_counter() - began
    cpu = time.process_time() - cpu
    return Speed(rows, runs * rows / took, took / runs * 1e3, cpu / (runs * rows) * 1e6)


if __name__ == "__main__":
    main(sys.argv[1:])
