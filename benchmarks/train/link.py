"""The second table: time to a target loss over a slow link, for each word that makes processes exchange less."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.network import Host, missing, network
from pipeline.system.errors import StageError

MEGABITS, TARGET, LIMIT_SECONDS = 100, 0.6, 240.0
_PORT = 29577

WORDS: dict[str, dict[str, Any]] = {
    "none": {},
    "fp16": {"compress": "fp16"},
    "accumulate 4": {"accumulate": 4, "batch_size": 256, "lr": 2e-3},
    "powersgd 4": {"compress": "powersgd:4"},
    "topk 1 %": {"compress": "topk:0.01"},
    "local_sgd 8": {"strategy": "local_sgd", "sync_every": 8},
    "local_sgd 32": {"strategy": "local_sgd", "sync_every": 32},
    "diloco 16": {"strategy": "diloco", "sync_every": 16},
}


def link(quick: bool) -> dict[str, Any]:
    if skipped := missing():
        return {"rows": [], "skipped": skipped}
    rows: list[dict[str, Any]] = []
    target = 100.0 if quick else TARGET  # met at the first look
    with network(2, MEGABITS) as ends:
        for name, settings in WORDS.items():
            result = _train(ends, settings, target, LIMIT_SECONDS)
            rows.append(_row(name, result, rows))
            print(line(rows[-1]), file=sys.stderr, flush=True)
    return {"rows": rows, "skipped": "", "megabits": MEGABITS, "target": target}


def text(result: Mapping[str, Any]) -> str:
    if result["skipped"]:
        return f"training over a slow link skipped: {result['skipped']}"
    head = f"two processes, {MEGABITS} Mbit/s between them: time until the validation loss is {result['target']}"
    return "\n".join([head, *[line(row) for row in result["rows"]]])


def line(row: Mapping[str, Any]) -> str:
    outcome = (
        f"{row['seconds']:7.1f} s" if row["reached"] else f"not within {row['seconds']:.0f} s, at {row['loss']:.2f}"
    )
    faster = f"{row['times_faster']:5.1f} x" if row["times_faster"] else ""
    return (
        f"{row['words']:<14}{outcome:<28}{faster:<10}{row['steps']:>6} steps"
        f"{row['step_ms']:>9.1f} ms/step{row['sent_bytes_per_step'] / 1e3:>10.1f} kB/step"
    )


def _row(name: str, result: Mapping[str, Any], previous_rows: list[dict[str, Any]]) -> dict[str, Any]:
    first_row = previous_rows[0] if previous_rows else result
    both_reached = first_row["reached"] and result["reached"]
    step_ms = result["seconds"] / result["steps"] * 1e3
    return {
        "words": name,
        **result,
        "step_ms": step_ms,
        "times_faster": first_row["seconds"] / result["seconds"] if both_reached else 0,
    }


def _train(ends: Sequence[Host], settings: Mapping[str, Any], target: float, limit: float) -> dict[str, Any]:
    """Run both processes to their end; return what the first one printed."""
    argv = [sys.executable, "-m", "benchmarks.train.linked", json.dumps(settings), str(target), str(limit)]
    with contextlib.ExitStack() as stack:
        processes = []
        for rank, end in enumerate(ends):
            env = {**os.environ, **_environment(rank, ends[0].address, end.interface)}
            process = subprocess.Popen(end.argv(argv), env=env, stdout=-1, stderr=-1, text=True)
            stack.callback(process.kill)
            processes.append(process)
        output, errors = processes[0].communicate(timeout=limit + 120)
        if processes[0].returncode:
            raise StageError(f"training over the link failed: {' / '.join(errors.strip().splitlines()[-3:])}")
        processes[1].communicate(timeout=60)
    result: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return result


def _environment(rank: int, master: str, interface: str) -> dict[str, str]:
    variables = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": master, "MASTER_PORT": _PORT}
    root = str(Path(__file__).resolve().parents[2])
    common = {"GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1", "PYTHONPATH": root}
    return {**{name: str(value) for name, value in variables.items()}, **common}
