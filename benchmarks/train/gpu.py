"""The GPU table: the speed with the best settings, and with each of them turned off alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from benchmarks.train.large import NETS
from pipeline.system.errors import StageError

GOAL_TOKENS_PER_SECOND = 465_000  # GPT-2 124M in bf16 on one GPU of the Hopper generation
_PUBLISHED = "llm.c published 463,000"
_HOPPER = 9  # major compute capability
_SECONDS = 900  # for one row
_CLEANUP_SECONDS = 60

BEST = {
    "compile": True,
    "precision": "bf16",
    "matmul_precision": "high",
    "recompute": "none",
    "deterministic": False,
    "device": "cuda",
    "checkpoint_every": 0,
}


@dataclass(frozen=True)
class Row:
    """What differs from the best configuration: settings of the section train, or the net."""

    title: str
    train: Mapping[str, Any] = field(default_factory=dict)
    net: str = ""  # empty: that of the table


def row_with(**train: bool | int | str) -> Row:
    return Row(", ".join(f"{name}: {str(value).lower()}" for name, value in train.items()), train)


ROWS = (
    Row("best"),
    row_with(compile=False),
    row_with(compile="blocks"),
    row_with(precision="fp32"),
    row_with(precision="fp32", matmul_precision="highest"),
    row_with(matmul_precision="highest"),
    row_with(recompute="blocks"),
    row_with(deterministic=True),
)
GPT2_ROWS = (*ROWS, Row("loss from whole logits", net="gpt2_whole_logits"), Row("AdamW not fused", net="gpt2_foreach"))
# Not compiled: the compiler chooses the memory format of convolutions itself.
RESNET_ROWS = (
    row_with(compile=False),
    row_with(compile=True),
    Row("from the host's memory", {"compile": False, "workers": 8}, net="resnet_from_host"),
)
TABLES: dict[str, dict[str, Sequence[Row]]] = {  # rows by net
    "gpt2": {"gpt2": GPT2_ROWS, "resnet": RESNET_ROWS},
    "deepseek": {"deepseek": ROWS},
}
_QUICK_ROWS = 2  # of each net


def gpu(quick: bool, net: str = "gpt2") -> dict[str, Any]:
    """Measure each row on one GPU and on all of them."""
    if not torch.cuda.is_available():
        return {"rows": [], "title": NETS[net].title, "skipped": "torch sees no CUDA device"}
    counts, steps = sorted({1, torch.cuda.device_count()}), 10 if quick else 40
    rows = []
    for name, choices in TABLES[net].items():
        for count in counts:
            first = None
            for choice in choices[: _QUICK_ROWS if quick else None]:
                row = measure(name, choice, count, steps)
                rows.append(row)
                first = first or row
                print(f"{count} x {name}: {line(row, first)}", file=sys.stderr, flush=True)  # all rows take an hour
    return {"rows": rows, "title": NETS[net].title, "skipped": ""}


def text(result: Mapping[str, Any]) -> str:
    if result["skipped"]:
        return f"{result['title']} on a GPU skipped: {result['skipped']}"
    tables = [
        [heading(rows[0]), *(line(row, rows[0]) for row in rows)]
        for rows in (list(group) for _, group in groupby(result["rows"], lambda row: (row["net"], row["gpus"])))
    ]
    tables += [[goal(result["rows"])]] if any(row["net"] == "gpt2" for row in result["rows"]) else []
    return "\n\n".join("\n".join(lines) for lines in tables)


def heading(row: Mapping[str, Any]) -> str:
    """Return the heading of the table that begins with this row."""
    net, gpus = NETS[row["net"]], f"{row['gpus']} x {row.get('device', 'GPU')}"
    return f"{net.title} on {gpus}: {net.unit}/s, ratio to the first row, model FLOPs utilization, peak memory"


def line(row: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    if reason := row.get("failed"):
        return f"{row['title']:<44}failed: {reason}"
    utilization = f"{row['mfu']:.1%}" if row["mfu"] is not None else "–"
    ratio = f"{row['per_second'] / first['per_second']:.3f}" if "per_second" in first else "–"
    return f"{row['title']:<44}{row['per_second']:>11,.0f} {ratio:>6} {utilization:>6} {row['memory_gb']:>6.1f} GiB"


def goal(rows: Sequence[Mapping[str, Any]]) -> str:
    """State whether GPT-2 reached its goal, and with which row."""
    sentence = (
        f"goal: GPT-2 124M, {GOAL_TOKENS_PER_SECOND:,} tokens/s or more on one Hopper GPU in bf16 ({_PUBLISHED}): "
    )
    measured = [
        row
        for row in rows
        if row["net"] == "gpt2" and row["gpus"] == 1 and "failed" not in row and row["precision"] == "bf16"
    ]
    if not measured:
        return f"{sentence}not measured"
    fastest = max(measured, key=lambda row: float(row["per_second"]))
    if fastest["capability"] != _HOPPER:
        return f"{sentence}not measured, this is no Hopper GPU"
    verdict = "met" if fastest["per_second"] >= GOAL_TOKENS_PER_SECOND else "missed"
    return f"{sentence}{verdict} with {fastest['per_second']:,.0f} ({fastest['title']})"


def measure(net: str, row: Row, gpus: int, steps: int) -> dict[str, Any]:
    """Measure one row; a failure is written in it, and the others go on."""
    settings = {**BEST, **row.train}
    about = {"net": net, "title": row.title, "gpus": gpus, "precision": settings["precision"]}
    try:
        return {**about, **_run(row.net or net, gpus, steps, settings)}
    except StageError as error:
        return {**about, "failed": str(error)}


def _run(net: str, gpus: int, steps: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
    argv = [sys.executable, *launch, "-m", "benchmarks.train.on_gpu", net, str(steps), json.dumps(settings)]
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": path, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            output, errors = process.communicate(timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            raise StageError(f"no result after {_SECONDS} seconds") from None
        finally:
            if process.poll() is None:
                _stop(process)
    return read_result(output, errors, process.returncode)


def _stop(process: subprocess.Popen[str]) -> None:
    """Let torchrun end its processes, which would keep the GPUs."""
    process.terminate()
    try:
        process.communicate(timeout=_CLEANUP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def read_result(output: str, errors: str, status: int) -> dict[str, Any]:
    """Return what the first process measured; a process that failed writes its reason."""
    results: list[dict[str, Any]] = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    if reasons := [result["failed"] for result in results if "failed" in result]:
        raise StageError(str(reasons[0]))
    if status or not results:
        raise StageError(f"exit status {status}: {' / '.join(errors.strip().splitlines()[-3:])}")
    return results[-1]
