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
from pipeline.contract.errors import StageError

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
        for name, words in WORDS.items():
            found = _train(ends, words, target, LIMIT_SECONDS)
            rows.append(_row(name, found, rows))
            print(line(rows[-1]), file=sys.stderr, flush=True)
    return {"rows": rows, "skipped": "", "megabits": MEGABITS, "target": target}


def text(result: Mapping[str, Any]) -> str:
    if result["skipped"]:
        return f"training over a slow link skipped: {result['skipped']}"
    head = f"two processes, {MEGABITS} Mbit/s between them: time until the validation loss is {result['target']}"
    return "\n".join([head, *[line(row) for row in result["rows"]]])


def line(row: Mapping[str, Any]) -> str:
    reached = (
        f"{row['seconds']:7.1f} s" if row["reached"] else f"not within {row['seconds']:.0f} s, at {row['loss']:.2f}"
    )
    faster = f"{row['times_faster']:5.1f} x" if row["times_faster"] else ""
    return (
        f"{row['words']:<14}{reached:<28}{faster:<10}{row['steps']:>6} steps"
        f"{row['step_ms']:>9.1f} ms/step{row['sent_bytes_per_step'] / 1e3:>10.1f} kB/step"
    )


def _row(name: str, found: Mapping[str, Any], before: list[dict[str, Any]]) -> dict[str, Any]:
    first = before[0] if before else found
    both = first["reached"] and found["reached"]
    step_ms = found["seconds"] / found["steps"] * 1e3
    return {
        "words": name,
        **found,
        "step_ms": step_ms,
        "times_faster": first["seconds"] / found["seconds"] if both else 0,
    }


def _train(ends: Sequence[Host], words: Mapping[str, Any], target: float, limit: float) -> dict[str, Any]:
    """Both processes to their end; what the first one printed."""
    argv = [sys.executable, "-m", "benchmarks.train.linked", json.dumps(words), str(target), str(limit)]
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
    found: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return found


def _environment(rank: int, master: str, interface: str) -> dict[str, str]:
    place = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": master, "MASTER_PORT": _PORT}
    root = str(Path(__file__).resolve().parents[2])
    shared = {"GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1", "PYTHONPATH": root}
    return {**{name: str(value) for name, value in place.items()}, **shared}
