"""The GPU table: tokens per second and model FLOPs utilisation, which counts the experts that a token takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.train.large import NETS
from pipeline.contract.errors import StageError

_SECONDS = 900


def gpu(quick: bool, net: str = "gpt2") -> dict[str, Any]:
    """Measure on one GPU and on all of them, compiled and not compiled."""
    title = NETS[net].title
    if not torch.cuda.is_available():
        return {"rows": [], "title": title, "skipped": "torch sees no CUDA device"}
    counts, steps = sorted({1, torch.cuda.device_count()}), 10 if quick else 40
    rows = [row(net, count, steps, compiled=compiled) for count in counts for compiled in (True, False)]
    return {"rows": rows, "title": title, "skipped": ""}


def text(result: Mapping[str, Any]) -> str:
    if result["skipped"]:
        return f"{result['title']} on a GPU skipped: {result['skipped']}"
    head = f"{result['title']}, bf16, fused AdamW: tokens/s and model FLOPs utilisation"
    return "\n".join([head, *map(line, result["rows"])])


def line(row: Mapping[str, Any]) -> str:
    mode = "compiled" if row["compiled"] else "as it is"
    if reason := row.get("failed"):
        return f"{row['gpus']} x {mode}: failed: {reason}"
    share = f"{row['mfu']:.1%}" if row["mfu"] is not None else "unknown peak"
    return f"{row['gpus']} x {row['device']:<24}{mode:<10}{row['tokens_per_second']:>12,.0f} tokens/s  {share}"


def row(net: str, gpus: int, steps: int, *, compiled: bool) -> dict[str, Any]:
    """Measure each contender; a failure is written in its row, and the others go on."""
    try:
        return {**_run(net, gpus, steps, compiled=compiled), "compiled": compiled}
    except (StageError, subprocess.TimeoutExpired) as error:
        return {"gpus": gpus, "compiled": compiled, "failed": str(error)}


def _run(net: str, gpus: int, steps: int, *, compiled: bool) -> dict[str, Any]:
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
    argv = [sys.executable, *launch, "-m", "benchmarks.train.on_gpu", net, str(steps), str(int(compiled))]
    root = str(Path(__file__).resolve().parents[2])
    env = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": root, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    result = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=_SECONDS, check=False)
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    if result.returncode or not lines:
        raise StageError(f"{net} on {gpus} GPUs failed: {' / '.join(result.stderr.strip().splitlines()[-3:])}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found
