"""`python -m bench.serve.raw MODEL.onnx THREADS SECONDS ROWS…`: the bare runtime, no service around it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime


def rows_per_second(model: Path, threads: int, seconds: float, rows: Sequence[int]) -> dict[int, float]:
    """By the rows of a batch; measured in a process of its own, as every contender is."""
    argv = [sys.executable, "-m", "bench.serve.raw", str(model), str(threads), str(seconds), *map(str, rows)]
    told = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60 + 10 * seconds * len(rows))
    return {int(key): value for key, value in json.loads(told.stdout).items()}


def main(argv: Sequence[str]) -> None:
    model, threads, seconds = argv[0], int(argv[1]), float(argv[2])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    print(json.dumps({rows: _speed(session, int(rows), seconds) for rows in argv[3:]}))


def _speed(session: Any, rows: int, seconds: float) -> float:
    source = session.get_inputs()[0]
    kind = np.int64 if source.type == "tensor(int64)" else np.float32
    batch = {source.name: np.ones((rows, *source.shape[1:]), kind)}
    for _ in range(3):
        session.run(None, batch)
    runs, began = 0, time.perf_counter()
    while (took := time.perf_counter() - began) < seconds:
        session.run(None, batch)
        runs += 1
    return runs * rows / took


if __name__ == "__main__":
    main(sys.argv[1:])
