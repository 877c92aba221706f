"""Send one architecture to `pipe export`, in a process of a pool, and return what came of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import torch

from benchmarks.architectures.models import write_source
from benchmarks.architectures.table import NOT_MADE, ROOT
from pipeline.executors.local import OF_ALL_STEPS, fork_server, step_environment
from pipeline.system.torchvision_operators import declare_torchvision_operators

SECONDS = 600


_process = contextlib.ExitStack()  # what each process of the pool has until it ends


def start_process() -> None:
    """Start a fork server with the libraries, which `pipe export` uses as its own: each row would import them again."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": "1"}
    declare_torchvision_operators()
    torch.set_num_threads(1)  # of this process, which makes the models
    project = SimpleNamespace(task="task.py:Task", codec="codec.py:Codec")
    modules = ("timm.data", "torchvision", *OF_ALL_STEPS)
    server = fork_server(ROOT / "examples" / "given" / "texts", step_environment(1, 1), cast("Any", project), modules)
    os.environ |= _process.enter_context(server)


def run_row(name: str, kind: str) -> dict[str, Any]:
    """Make the model, export it, and return what is known of it."""
    row: dict[str, Any] = {"name": name, "kind": kind}
    with tempfile.TemporaryDirectory(prefix="architectures-") as temporary:
        folder = Path(temporary)
        try:
            source = write_source(name, kind, folder)
        except Exception as error:  # each library raises its own
            reason = f"{NOT_MADE}: {type(error).__name__}: {error}"
            return {**row, "exported": False, "seconds": 0.0, "cpu": 0.0, "reason": _one_line(reason, folder)}
        begin, cpu = time.monotonic(), _child_seconds()
        status, output, errors = _run([*source, "--to", "project", "-o", "json"], folder)
        row |= {"seconds": round(time.monotonic() - begin, 1), "cpu": round(_child_seconds() - cpu, 1)}
        if status == 0:
            return {**row, "exported": True, **_facts(json.loads(output))}
        return {**row, "exported": False, "reason": _one_line(_reason(status, output + errors), folder)}


def _child_seconds() -> float:
    """Return the processor time of all that has been run, also by the fork server."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    servers = [child.cpu_times() for child in psutil.Process().children()]
    forked = sum(times.children_user + times.children_system for times in servers)
    return usage.ru_utime + usage.ru_stime + forked


def _run(arguments: Sequence[str], folder: Path) -> tuple[int, str, str]:
    """Run `pipe export`; return the status, which is -9 if it took too long, and what it printed."""
    command = [sys.executable, "-m", "pipeline", "export", *arguments]
    with subprocess.Popen(
        command, cwd=folder, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            output, errors = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            process.communicate()
            return -9, "", ""
    return process.returncode, output, errors


def _reason(status: int, printed: str) -> str:
    if status == -9:
        return f"took longer than {SECONDS} seconds"
    lines = [json.loads(line)["error"] for line in printed.splitlines() if line.startswith('{"error"')]
    return lines[-1] if lines else f"exit status {status}: {printed.strip().splitlines()[-1:]}"


def _one_line(reason: str, folder: Path) -> str:
    reason = " ".join(reason.replace(f"{folder}/", "").split())
    return re.sub(r"; its output is in \S+", "", reason)[:300]


def _facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dynamic axes, the largest difference from torch, and how many answers the library gives, too."""
    export = Path(facts["path"]) / "export"
    signature = json.loads((export / "bundle" / "signature.json").read_text())
    parity = json.loads((export / "parity.json").read_text())
    axes = {axis for spec in signature["inputs"] for axis in spec["shape"] if isinstance(axis, str)}
    answers = re.search(
        r"(\d+) answers equal to those of the model's own library", (export.parent / "logs" / "export.log").read_text()
    )
    return {
        "axes": sorted(axes),
        "difference": float(f"{max(run['max_abs_error'] for run in parity['runs'] + parity['coverage']):.2g}"),
        "answers": int(answers[1]) if answers else 0,
    }
