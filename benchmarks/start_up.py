"""How long `pipe run train` takes to its first step: `python -m benchmarks.start_up`.

The data are prepared already. Each training has another seed, so that none is reused.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.faults.measure import PROJECT

_POLL_SECONDS = 0.01
_SETTINGS = ("train.epochs=1", "train.max_samples=256", "train.batch_size=32", "train.log_every=1")


class Start(NamedTuple):
    """One training: seconds from the command to the first step and to the end, and CPU seconds of all processes."""

    first_step: float
    end: float
    cpu: float


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start_up", description="time to the first step")
    parser.add_argument("--project", type=Path, default=PROJECT, help="folder with pipe.yaml; a copy of it is used")
    parser.add_argument("--trainings", type=int, default=5)
    parser.add_argument("--processes", type=int, default=1, help="of each training")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder) / "project"
        shutil.copytree(options.project, project, ignore=shutil.ignore_patterns("runs"))
        start(project, "prepare").wait()
        starts = [measure(project, options.processes, seed) for seed in range(options.trainings)]
    for name, values in zip(Start._fields, zip(*starts, strict=True), strict=True):
        print(f"{name:<12}{statistics.median(values):6.2f} s  ({min(values):.2f} to {max(values):.2f})")
    return 0


def measure(project: Path, processes: int, seed: int) -> Start:
    known, used = set((project / "runs").glob("*/run.json")), _children_cpu()
    started, first_step = time.perf_counter(), None
    command = start(project, "train", *_SETTINGS, f"train.processes={processes}", f"train.seed={seed}")
    while command.poll() is None:
        new = [path.parent for path in (project / "runs").glob("*/run.json") if path not in known]
        if first_step is None and any(has_stepped(run) for run in new):
            first_step = time.perf_counter() - started
        time.sleep(_POLL_SECONDS)
    if command.returncode or first_step is None:
        sys.exit(f"this failed: {command.args!r}")
    return Start(first_step, time.perf_counter() - started, _children_cpu() - used)


def has_stepped(run: Path) -> bool:
    for folder in ("train.partial", "train"):
        with contextlib.suppress(FileNotFoundError):
            if (run / folder / "metrics.jsonl").stat().st_size:
                return True
    return False


def start(project: Path, *words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pipeline", "-C", str(project), "run", *words]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _children_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
