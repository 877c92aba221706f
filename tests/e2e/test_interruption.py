from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import subprocess
import time

import psutil
import pytest

from pipeline.contract.run import Run

from .project_folder import HELD_AFTER, PIPE, ProjectFolder, processes_of, until_held, wait_for, workers_of

TRAIN = ("run", "train", "--force", "train")


@pytest.mark.long
def test_resume_after_a_killed_worker_loses_nothing(copied: ProjectFolder, expected: bytes) -> None:
    with copied.paused_training(HELD_AFTER, *TRAIN, "train.restarts=0") as pipe:
        run = until_held(copied)
        victim = workers_of(run)[-1]
        victim.kill()
        _, stderr = pipe.communicate(timeout=300)
    assert pipe.returncode == 1, stderr
    assert re.search(r"error: train: rank 1 on \S+ was killed \(SIGKILL\), by hand or by the kernel", stderr)
    assert f"to continue after fixing it: pipe run --resume {run.id}" in stderr
    assert processes_of(run) == []
    stderr = copied.pipe("run", "--resume").stderr
    assert "resumed from the checkpoint of step 50 of 120" in stderr
    assert copied.latest.id == run.id, "a resumed run goes on in its own directory"
    assert copied.weights == expected
    lines = [json.loads(line) for line in (run.output("train") / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "loss" in line]
    assert steps == list(range(10, 121, 10)), "each line once, though some steps were done twice"


@pytest.mark.long
def test_killed_pipe_ends_its_processes_and_resume_skips_a_damaged_checkpoint(
    copied: ProjectFolder, expected: bytes
) -> None:
    with copied.paused_training(HELD_AFTER, *TRAIN) as pipe:
        run = until_held(copied)
        assert len(processes_of(run)) == 4, "a node, its agent and two workers"
        pipe.kill()
        wait_for(lambda: not processes_of(run))
        pipe.wait(300)
    assert json.loads(copied.pipe("status", "-o", "json").stdout)["runs"][0]["state"] == "train died"
    newest = copied.checkpoints / "step-00000050" / "0.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1] + b"\xff")
    copied.pipe("run", "--resume")
    log = run.log("train").read_text()
    assert "warning: checkpoint step-00000050 is damaged: the digest of 0.safetensors does not match; skipped" in log
    assert "resumed from the checkpoint of step 40 of 120" in log
    assert copied.weights == expected


@pytest.mark.long
def test_trainings_run_concurrently_and_one_can_be_resumed(copied: ProjectFolder) -> None:
    with copied.paused_training(HELD_AFTER, *TRAIN, "train.processes=1") as pipe:
        run = until_held(copied)
        for words in (("run", "--resume"), ("run", "--resume", run.id), ("gc",)):
            stderr = copied.pipe(*words, expect=2).stderr
            assert f"(pid {pipe.pid} on " in stderr
            assert len(stderr.splitlines()) == 1
        copied.pipe("status")  # reading is allowed at any time
        beside = json.loads(copied.pipe("run", "train", "train.epochs=2", "train.processes=1", "-o", "json").stdout)
        assert (beside["run"] != run.id, beside["steps"]["train"]) == (True, "done")
        assert run.read().steps["train"].status == "running"
        assert "train" in copied.plan()
        end_with(signal.SIGHUP, pipe, run)
    shutil.rmtree(copied.runs / beside["run"])
    stderr = copied.pipe("run", "prepare").stderr
    assert f"note: run {run.id} is unfinished; `pipe run --resume` continues it" in stderr
    with copied.paused_training(HELD_AFTER, "run", "--resume", run.id) as pipe:
        wait_for(lambda: "resumed from the checkpoint of step 50 of 120" in run.log("train").read_text())
        end_with(signal.SIGINT, pipe, run)


@pytest.mark.long
def test_removed_run_folder_is_named(copied: ProjectFolder) -> None:
    with copied.paused_training(HELD_AFTER, *TRAIN, "train.processes=1") as pipe:
        run = until_held(copied)
        (run.path / "run.json").unlink()
        while run.path.exists():  # training writes to it
            shutil.rmtree(run.path, ignore_errors=True)
        for process in processes_of(run):
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended by itself
                process.kill()
        _, stderr = pipe.communicate(timeout=300)
    assert pipe.returncode == 2, stderr
    last = f"error: run {run.id}: its folder {run.path} was removed, or cannot be reached, while the run was working"
    assert stderr.splitlines()[-1].startswith(last)
    assert "Traceback" not in stderr


UNEQUAL = """
import os
import torch.distributed as dist


class Unequal(Sides):
    def loss(self, outputs, batch):
        dist.all_reduce(torch.ones(4 if os.environ["RANK"] == "0" else 4000))
        return super().loss(outputs, batch)
"""


@pytest.mark.long  # tests/train/elastic/test_agent.py tests the agent's part
def test_processes_that_call_different_collectives_are_not_restarted(copied: ProjectFolder) -> None:
    task = copied.folder / "task.py"
    task.write_text(task.read_text() + UNEQUAL)
    stderr = copied.pipe("run", "train", "task=task.py:Unequal", "train.processes=2", expect=1).stderr
    assert "error: train: the processes call different collectives: rank " in stderr
    assert "bytes in a collective where it expected " in stderr
    for raw in ("terminate called", "what():", "starting again", "SIGABRT", "frame #"):
        assert raw not in stderr


@pytest.mark.long
def test_interrupted_training_resumes_from_its_last_step(copied: ProjectFolder, expected: bytes) -> None:
    with copied.paused_training(HELD_AFTER, *TRAIN) as pipe:
        run = until_held(copied)
        pipe.send_signal(signal.SIGTERM)
        step_until_end(copied, pipe)
        ended_well(pipe, run, 143)
    step = int(max(path.name for path in copied.checkpoints.glob("step-*"))[5:])
    assert step > 50, "beyond the last one that was due"
    assert run.read().steps["train"].status == "interrupted"
    copied.pipe("run", "--resume")
    assert f"resumed from the checkpoint of step {step} of 120" in run.log("train").read_text()
    assert copied.weights == expected


def step_until_end(project: ProjectFolder, pipe: subprocess.Popen[str]) -> None:
    """Let training make one step at a time until the command ends."""
    aside = project.folder / "next"
    for steps in range(HELD_AFTER + 1, 120):
        if pipe.poll() is not None:
            break
        aside.write_text(str(steps))
        aside.replace(project.folder / "hold")
        time.sleep(0.1)


def end_with(sent: signal.Signals, pipe: subprocess.Popen[str], run: Run) -> None:
    pipe.send_signal(sent)
    ended_well(pipe, run)


def ended_well(pipe: subprocess.Popen[str], run: Run, status: int = 130) -> None:
    _, stderr = pipe.communicate(timeout=300)
    assert pipe.returncode == status, stderr
    assert stderr.splitlines()[-1] == f"error: interrupted; nothing is lost, `pipe run --resume {run.id}` continues"
    assert "Traceback" not in stderr
    assert processes_of(run) == []


def test_interrupted_log_command_ends_without_a_traceback(finished: ProjectFolder) -> None:
    follow = psutil.Popen([*PIPE, "logs", "train", "-f"], cwd=finished.folder, stdout=-1, stderr=-1, text=True)
    try:
        assert follow.stdout.readline()
        follow.send_signal(signal.SIGINT)
        _, stderr = follow.communicate(timeout=300)
    finally:
        if follow.poll() is None:
            follow.kill()
    assert (follow.returncode, "Traceback" in stderr) == (130, False)
