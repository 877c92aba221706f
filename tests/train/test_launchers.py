"""One run under every launcher: the same weights, and nothing left over however it ends."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import pytest

from pipeline.launch import step_environment, with_this_python
from pipeline.launchers import launcher_environment, mpirun, torchrun
from pipeline.spec.files import write_json
from pipeline.spec.rank import Rank
from pipeline.spec.run import Run
from pipeline.spec.sections import Train

from .conftest import Project, equal, failure, weights

needs_mpirun = pytest.mark.skipif(
    shutil.which("mpirun") is None, reason="no mpirun: install Open MPI (apt-get install openmpi-bin)"
)
ENVIRONMENT = {
    **step_environment(processes=2, cores=2),
    **launcher_environment(Train(launcher="mpirun"), os.geteuid()),
}


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


def slurm(rank: int, **more: str) -> dict[str, str]:
    """What srun sets in a step of two tasks on one machine."""
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


def finish(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        said, _ = process.communicate(timeout=90)
        assert process.returncode == 0, said


@needs_mpirun
def test_the_weights_are_the_same_under_every_launcher_bit_for_bit(project: Project) -> None:
    runs = {name: project.run(name) for name in ("torchrun", "mpirun", "srun")}
    finish(start(project, torchrun(2, module(runs["torchrun"]))))
    finish(start(project, mpirun(2, module(runs["mpirun"]))))
    finish(*(start(project, module(runs["srun"]), **slurm(rank)) for rank in (1, 0)))
    for name in ("mpirun", "srun"):
        assert equal(weights(runs[name]), weights(runs["torchrun"])), name
        assert [path.name for path in runs[name].path.glob("meeting*")] == [], "the address is gone when all have met"


def test_an_address_left_by_an_earlier_launch_is_not_taken(project: Project) -> None:
    run = project.run(epochs=1)
    env = [slurm(rank, SLURM_JOB_ID="8") for rank in (0, 1)]
    late = start(project, module(run), **env[1])
    stale = {"host": "127.0.0.1", "port": 9, "mark": "old"}  # nobody listens on the port that discards
    write_json(run.path / f"meeting-{Rank.from_env(env[1]).job}.json", stale)
    finish(late, start(project, module(run), **env[0]))


def test_a_process_that_nobody_joins_says_what_it_waited_for(project: Project) -> None:
    run = project.run(timeout_seconds=1)
    alone = start(project, module(run), **slurm(1))
    alone.communicate(timeout=60)
    assert alone.returncode == 1
    assert "rank 1 on" in str(failure(run))
    assert "waited 1 s for rank 0 to publish where to meet" in str(failure(run))


@needs_mpirun
def test_a_bug_under_mpirun_ends_every_process_and_is_told_with_its_rank(project: Project) -> None:
    project.replace(
        "    def loss(self, outputs, batch):\n",
        "    def loss(self, outputs, batch):\n"
        '        import os\n        assert os.environ["OMPI_COMM_WORLD_RANK"] == "0", "mine"\n',
    )
    run = project.run()
    process = start(project, mpirun(2, module(run)))
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert str(failure(run)).startswith("rank 1: AssertionError: mine (task.py, line")
    assert left_over(run) == []


@needs_mpirun
def test_a_killed_runner_takes_all_processes_of_mpirun_along(project: Project) -> None:
    project.replace(
        "    def loss(self, outputs, batch):\n",
        "    def loss(self, outputs, batch):\n"
        '        import os, pathlib, time\n        pathlib.Path(f"at-work-{os.getpid()}").touch()\n'
        "        time.sleep(60)\n",
    )
    run = project.run()
    program = (
        "import sys; from pathlib import Path; from pipeline.launch import LocalLauncher; "
        "LocalLauncher(Path.cwd(), lambda: None).launch(tuple(sys.argv[2:]), Path(sys.argv[1]), {})"
    )
    runner = subprocess.Popen(
        [sys.executable, "-c", program, str(project.root / "log"), *mpirun(2, module(run))],
        cwd=project.root,
        env={**os.environ, **ENVIRONMENT},
    )
    await_true(lambda: len(list(project.root.glob("at-work-*"))) == 2, runner)
    assert len(left_over(run)) >= 3, "mpirun and its two processes"
    runner.kill()
    runner.wait(timeout=10)
    await_true(lambda: left_over(run) == [], None)


def left_over(run: Run) -> list[int]:
    """Processes whose command names the run."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline", "status"])
        if str(run.path) in (process.info["cmdline"] or []) and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def await_true(came: Callable[[], bool], process: subprocess.Popen[bytes] | None) -> None:
    deadline = time.monotonic() + 60
    while not came():
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None
        time.sleep(0.05)
