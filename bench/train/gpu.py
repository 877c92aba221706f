"""The GPU table: tokens per second and model FLOPs utilisation of a GPT-2 of 124 million parameters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pipeline.spec.errors import StageError

_SECONDS = 900


def gpu(quick: bool) -> dict[str, Any]:
    """On one GPU, and on all of them where there are several."""
    if not torch.cuda.is_available():
        return {"rows": [], "skipped": "torch sees no CUDA device"}
    counts = sorted({1, torch.cuda.device_count()})
    return {"rows": [_row(count, steps=10 if quick else 40) for count in counts], "skipped": ""}


def text(result: Mapping[str, Any]) -> str:
    if result["skipped"]:
        return f"GPT-2 on a GPU skipped: {result['skipped']}"
    lines = ["GPT-2 124M, bf16, compiled, fused AdamW: tokens/s and model FLOPs utilisation"]
    for row in result["rows"]:
        share = f"{row['mfu']:.1%}" if row["mfu"] is not None else "unknown peak"
        lines.append(f"{row['gpus']} x {row['device']:<24}{row['tokens_per_second']:>12,.0f} tokens/s  {share}")
    return "\n".join(lines)


def _row(gpus: int, steps: int) -> dict[str, Any]:
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
    argv = [sys.executable, *launch, "-m", "bench.train.gpt2", str(steps)]
    house = str(Path(__file__).resolve().parents[2])
    env = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": house, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=_SECONDS, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise StageError(f"GPT-2 on {gpus} GPUs failed: {' / '.join(done.stderr.strip().splitlines()[-3:])}")
    row: dict[str, Any] = json.loads(lines[-1])
    return row
