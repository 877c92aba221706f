"""Start training as the launchers do, and find processes that are left."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable

import psutil

from pipeline.contract.run import Run
from pipeline.contract.settings.stages import Train
from pipeline.executors.local import step_environment, with_this_python
from pipeline.training.launchers import launcher_environment

from ..fork_server import ForkedProcess
from .conftest import Project

ENVIRONMENT = {**step_environment(processes=2, cores=2), **launcher_environment(Train(launcher="mpirun"), os.geteuid())}


def module(run: Run) -> tuple[str, ...]:
    return ("python", "-m", "train", str(run.path))


def start(project: Project, argv: tuple[str, ...], **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        with_this_python(argv),
        cwd=project.root,
        env={**os.environ, **ENVIRONMENT, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def task_of(project: Project, run: Run, rank: int, **env: str) -> ForkedProcess:
    """Start one of srun's two tasks from the fork server, which has imported torch."""
    output = project.root / f"{run.id}-{rank}.txt"
    return ForkedProcess(module(run)[1:], project.root, {**ENVIRONMENT, **slurm(rank, **env)}, output, output)


def slurm(rank: int, **more: str) -> dict[str, str]:
    """Return the variables that srun sets for a step of two tasks on one machine."""
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        **more,
    }


def finish(*processes: subprocess.Popen[str] | ForkedProcess) -> None:
    output = [process.communicate(timeout=90)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(output)


def left_over(run: Run) -> list[int]:
    """Return the pids of processes whose command names the run."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline", "status"])
        if str(run.path) in (process.info["cmdline"] or []) and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def await_true(came: Callable[[], bool], process: subprocess.Popen[bytes] | None) -> None:
    deadline = time.monotonic() + 300
    while not came():
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None
        time.sleep(0.05)
