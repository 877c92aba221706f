"""One run under every launcher: the same weights, and nothing left over however it ends."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from pipeline.system.files import write_json
from pipeline.system.processes import Rank
from pipeline.training.launchers import mpirun

from .conftest import Project, equal, failure, weights
from .launching import ENVIRONMENT, await_true, finish, left_over, module, slurm, start, task_of

needs_mpirun = pytest.mark.skipif(
    shutil.which("mpirun") is None, reason="no mpirun: install Open MPI (apt-get install openmpi-bin)"
)


@needs_mpirun
@pytest.mark.long
def test_every_launcher_trains_identical_weights(project: Project) -> None:
    """With torchrun's own options here; tests/e2e run it for a whole pipeline."""
    runs = {name: project.run(name) for name in ("torchrun", "mpirun", "srun")}
    assert project.train(runs["torchrun"], processes=2).returncode == 0
    finish(start(project, mpirun(2, module(runs["mpirun"]))))
    finish(*(task_of(project, runs["srun"], rank) for rank in (1, 0)))
    for name in ("mpirun", "srun"):
        assert equal(weights(runs[name]), weights(runs["torchrun"])), name
        assert [path.name for path in runs[name].path.glob("meeting*")] == [], "the address is gone when all have met"


def test_address_of_an_earlier_launch_is_ignored(project: Project) -> None:
    run = project.run(epochs=1)
    late = task_of(project, run, 1)
    stale = {"host": "127.0.0.1", "port": 9, "mark": "old"}  # the discard port, on which no process listens
    write_json(run.path / f"meeting-{Rank.from_env(slurm(1)).job}.json", stale)
    finish(late, task_of(project, run, 0))


def test_timed_out_process_reports_what_it_waited_for(project: Project) -> None:
    run = project.run(timeout_seconds=1)
    alone = task_of(project, run, 1)
    alone.communicate(timeout=300)
    assert alone.returncode == 1
    assert "rank 1 on" in str(failure(run))
    assert "waited 1 s for rank 0 to publish where to meet" in str(failure(run))


@pytest.mark.long
@needs_mpirun
def test_a_bug_under_mpirun_is_reported_with_its_rank(project: Project) -> None:
    project.replace(
        "    def loss(self, outputs, batch):\n",
        "    def loss(self, outputs, batch):\n"
        '        import os\n        assert os.environ["OMPI_COMM_WORLD_RANK"] == "0", "mine"\n',
    )
    run = project.run()
    process = start(project, mpirun(2, module(run)))
    process.communicate(timeout=300)
    assert process.returncode != 0
    assert str(failure(run)).startswith("rank 1: AssertionError: mine (task.py, line")
    assert left_over(run) == []


@pytest.mark.long
@needs_mpirun
def test_processes_of_mpirun_end_with_a_killed_runner(project: Project) -> None:
    project.replace(
        "    def loss(self, outputs, batch):\n",
        "    def loss(self, outputs, batch):\n"
        '        import os, pathlib, time\n        pathlib.Path(f"at-work-{os.getpid()}").touch()\n'
        "        time.sleep(60)\n",
    )
    run = project.run()
    program = (
        "import sys; from pathlib import Path; from pipeline.executors.local import LocalLauncher; "
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
    runner.wait(timeout=300)
    await_true(lambda: left_over(run) == [], None)
