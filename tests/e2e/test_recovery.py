"""Training that loses a process or a machine continues by itself, and ends with the weights of an undisturbed one."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import psutil
import pytest

from pipeline.contract.restarts import read_attempts
from pipeline.contract.run import Run
from tests.ports import free_port

from .project_folder import (
    HELD_AFTER,
    PIPE,
    ProjectFolder,
    environment,
    processes_of,
    running_module,
    until_held,
    wait_for,
    workers_of,
)

SERVER = "pipeline.system.fork_server"
TRAIN = ("run", "train", "--force", "train")


def hold_after(project: ProjectFolder, steps: int) -> None:
    """Let each attempt wait after so many steps; the file is replaced atomically."""
    aside = project.folder / "hold.new"
    aside.write_text(str(steps))
    aside.replace(project.folder / "hold")


def let_go(project: ProjectFolder) -> None:
    hold_after(project, 1000)


@pytest.mark.long  # tests/nodes has a test for each of the first three
def test_training_survives_a_killed_worker_agent_node_and_fork_server(copied: ProjectFolder, expected: bytes) -> None:
    with copied.paused_training(HELD_AFTER, *TRAIN, "train.restarts=4") as pipe:
        run = until_held(copied)
        hold_after(copied, 5)  # the next attempts write no checkpoint
        workers_of(run)[-1].kill()
        wait_for(lambda: len(read_attempts(run.path).attempts) == 2)
        running_module(run, "train.elastic.agent")[0].kill()
        wait_for(lambda: len(read_attempts(run.path).attempts) == 3)
        wait_for(lambda: "(2 of 4 without" in run.log("train").read_text())
        running_module(run, "pipeline.training.node")[0].kill()
        wait_for(lambda: len(read_attempts(run.path).attempts) == 4)
        (server,) = (child for child in psutil.Process(pipe.pid).children() if SERVER in child.cmdline())
        server.kill()
        wait_for(lambda: len(read_attempts(run.path).attempts) == 5)
        let_go(copied)
        _, stderr = pipe.communicate(timeout=300)
    assert pipe.returncode == 0, stderr
    assert re.search(
        r"rank \d on \S+ was killed \(SIGKILL\); starting again from the checkpoint of step 50 \(1 of 4 without", stderr
    )
    assert re.search(r"was killed \(SIGKILL\); starting again from the checkpoint of step 50 \(2 of 4 without", stderr)
    assert re.search(r"the node on \S+ was killed \(SIGKILL\); starting again .* step 50 \(3 of 4 without", stderr)
    assert re.search(r"the launcher on \S+ was killed \(SIGKILL\); starting again .* step 50 \(4 of 4 without", stderr)
    assert copied.weights == expected
    assert processes_of(run) == []
    assert read_attempts(run.path).seconds_lost > 0
    summary = json.loads((run.output("train") / "summary.json").read_text())
    assert (summary["restarts"], summary["seconds_lost"]) == (4, read_attempts(run.path).seconds_lost)
    assert f"training of {run.id} was restarted 4 times automatically" in copied.pipe("status").stdout
    assert "4 times automatically" in (run.path / "report.html").read_text()


@pytest.fixture
def pair(copied: ProjectFolder) -> tuple[ProjectFolder, tuple[str, ...]]:
    """A project, and the command of two simulated machines with one process each and a local rendezvous."""
    where = f"train.rendezvous=127.0.0.1:{free_port()}"
    return copied, (*TRAIN, "train.nodes=1:2", "train.processes=1", "train.timeout_seconds=30", where)


def join(project: ProjectFolder, run: Run, stderr: Path) -> subprocess.Popen[bytes]:
    with stderr.open("wb") as output:
        return subprocess.Popen(
            [*PIPE, "join", run.id], cwd=project.folder, env=environment({}), stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT,
        )  # fmt: skip


@pytest.mark.long
def test_training_continues_when_a_machine_joins_and_is_lost(
    pair: tuple[ProjectFolder, tuple[str, ...]], tmp_path: Path
) -> None:
    project, words = pair
    with project.paused_training(HELD_AFTER, *words) as pipe:
        run = until_held(project)
        other = join(project, run, tmp_path / "join.txt")
        story = wait_for(lambda: len(read_attempts(run.path).attempts) == 2 and read_attempts(run.path))
        assert (story.attempts[1].after, len(story.attempts[1].hosts)) == ("change", 2)
        let_go(project)
        psutil.Process(other.pid).kill()
        other.wait(timeout=300)
        _, stderr = pipe.communicate(timeout=300)
    assert pipe.returncode == 0, stderr
    assert f"on each other machine, in this folder: pipe join {run.id}" in stderr
    last = read_attempts(run.path).attempts[-1]
    assert (last.after, len(last.hosts)) == ("loss", 1)
    assert last.step >= 50
    wait_for(lambda: processes_of(run) == [])


@pytest.mark.long
def test_machine_waits_for_the_first_one_and_continues_with_it(
    pair: tuple[ProjectFolder, tuple[str, ...]], tmp_path: Path
) -> None:
    project, words = pair
    known, output = project.latest.id, tmp_path / "join.txt"
    with project.paused_training(HELD_AFTER, *words) as pipe:
        wait_for(lambda: project.latest.id != known)
        run = project.latest
        other = join(project, run, output)
        wait_for(lambda: (project.checkpoints / "step-00000050").exists())
        pipe.kill()
        wait_for(
            lambda: (
                f"to bring it back, on any machine that has this folder: pipe run --resume {run.id}"
                in output.read_text()
            )
        )
        let_go(project)
        project.pipe("run", "--resume", run.id)
    assert other.wait(timeout=300) == 0, output.read_text()
    assert len(read_attempts(run.path).attempts) >= 2
    assert processes_of(run) == []


@pytest.mark.long  # tests/pipeline/training/test_node.py tests the message
def test_too_few_machines_are_reported_after_a_timeout(copied: ProjectFolder) -> None:
    where = f"train.rendezvous=127.0.0.1:{free_port()}"
    stderr = copied.pipe(*TRAIN, "train.nodes=2:3", "train.timeout_seconds=3", where, expect=1).stderr
    assert re.search(
        r"train\.nodes=2:3: 1 of 2 machines came within 48 s; to fix it, on each other machine, .*: pipe join", stderr
    )
