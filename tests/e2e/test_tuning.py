from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.contract.run import Run
from pipeline.history import load_history

from .project_folder import PIPE, ProjectFolder, environment, processes_of, wait_for

pytestmark = pytest.mark.long

HELD_AFTER = 15  # the checkpoint of step 10, where the first epoch ends, is there
SPACE = """
tune:
  trials: 2
  pruner: none
  space:
    train.lr: {low: 0.01, high: 0.05, log: true}
    train.batch_size: {choices: [24]}
"""


@pytest.fixture
def project(tmp_path: Path) -> Iterator[ProjectFolder]:
    project = ProjectFolder.create(tmp_path / "sides")
    project.replace("pipe.yaml", "epochs: 12", "epochs: 3\n  processes: 1")
    with (project.folder / "pipe.yaml").open("a") as file:
        file.write(SPACE)
    yield project
    project.stop()


def trial_run(project: ProjectFolder, number: int) -> Run | None:
    return next((run for run, body in load_history(project.runs) if body.trial == number), None)


def until_held(project: ProjectFolder, number: int) -> Run:
    """Wait until the training of a trial is paused after a checkpoint; return its run."""
    run: Run = wait_for(lambda: trial_run(project, number))
    wait_for((run.partial("train") / "checkpoints" / "step-00000010" / "manifest.json").exists)
    return run


def tuned(project: ProjectFolder, *words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(project.pipe("tune", *words, "-o", "json").stdout)
    return found


def workers_of(pipe: subprocess.Popen[str]) -> list[psutil.Process]:
    return [child for child in psutil.Process(pipe.pid).children() if "pipeline.tune" in child.cmdline()]


def test_interrupted_and_killed_search_continues_the_same_trial(project: ProjectFolder) -> None:
    with project.paused_training(HELD_AFTER, "tune") as pipe:
        run = until_held(project, 0)
        pipe.send_signal(signal.SIGINT)
        _, output = pipe.communicate(timeout=300)
    assert pipe.returncode == 130, output
    assert output.splitlines()[-1] == "error: interrupted; no trial is lost, run the same command to continue"
    assert "Traceback" not in output
    assert processes_of(run) == []
    assert [trial["state"] for trial in tuned(project, "status")["trials"]] == ["unfinished"]

    with project.paused_training(HELD_AFTER, "tune") as pipe:
        wait_for(lambda: len(processes_of(run)) == 2)  # torchrun and one process
        workers = workers_of(pipe)
        assert len(workers) == 1
        workers[0].kill()
        _, output = pipe.communicate(timeout=300)
        wait_for(lambda: not processes_of(run))  # they check their parent once they have started
    assert pipe.returncode == 1, output
    ended = "error: the workers ended with status -9 before the search was complete; run the same command to continue"
    assert output.splitlines()[-1] == ended

    found = tuned(project, "--workers", "2")
    assert {trial["trial"]: trial["state"] for trial in found["trials"]} == {0: "done", 1: "done"}
    assert {trial["run"] for trial in found["trials"]} == {run.id, getattr(trial_run(project, 1), "id", None)}
    assert "resumed from the checkpoint of step 10 of 30" in run.log("train").read_text()
    best = project.latest
    assert best.id == found["run"]
    assert best.read().steps["train"].reused_from == found["trials"][0]["run"], "the best trial is not trained again"
    assert best.config.train.lr == found["trials"][0]["train.lr"]
    assert found["steps"] == dict.fromkeys(("check", "prepare", "train", "evaluate"), "done")


def test_second_search_takes_over_the_trial_of_a_killed_one(project: ProjectFolder) -> None:
    with project.paused_training(HELD_AFTER, "tune") as first:
        run = until_held(project, 0)
        second = subprocess.Popen(
            [*PIPE, "tune", "--until", "train", "-o", "json"],
            cwd=project.folder,
            env=environment({}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            until_held(project, 1)
            assert [trial["state"] for trial in tuned(project, "status")["trials"]] == ["running", "running"]
            output = project.pipe("gc", expect=2).stderr
            assert "`pipe tune" in output and "is working here" in output, "no command may remove runs"
            workers = workers_of(first)
            first.kill()
            wait_for(lambda: not any(worker.is_running() for worker in workers))
            (project.folder / "held longer").write_text("1000")
            (project.folder / "held longer").replace(project.folder / "hold")  # never seen half written
            answer, output = second.communicate(timeout=300)
        finally:
            second.kill()
    assert second.returncode == 0, output
    found = json.loads(answer)
    assert {trial["trial"]: trial["state"] for trial in found["trials"]} == {0: "done", 1: "done"}
    assert "resumed from the checkpoint of step 10 of 30" in run.log("train").read_text()
    assert len(load_history(project.runs)) == 4, "prepare, two trials, and the best one's run"
