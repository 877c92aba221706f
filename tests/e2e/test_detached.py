"""Runs in the background, which no terminal can end."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import pytest

from .project_folder import PIPE, ProjectFolder, environment, wait_for

TRAIN = ("run", "train", "--force", "train", "train.processes=1", "--detach", "-o", "json")


@pytest.mark.long
def test_a_run_goes_on_without_its_terminal_and_can_be_followed(copied: ProjectFolder) -> None:
    hold = copied.folder / "hold"
    hold.write_text("5")
    run_id = json.loads(copied.pipe(*TRAIN).stdout)["run"]
    assert copied.latest.id == run_id
    with subprocess.Popen(
        [*PIPE, "attach"], cwd=copied.folder, env=environment({}), stdout=subprocess.PIPE, text=True
    ) as follower:
        output = follower.stdout
        assert output is not None
        wait_for(lambda: "train: forced" in output.readline())
        follower.send_signal(signal.SIGINT)
        assert follower.wait(300) == 130
    hold.unlink()
    assert "train: done in" in copied.pipe("attach", run_id).stdout
    assert copied.latest.read().steps["train"].status == "done"


@pytest.mark.long
def test_a_run_that_ends_otherwise_is_reported_with_its_status(copied: ProjectFolder) -> None:
    hold = copied.folder / "hold"
    hold.write_text("5")
    run_id = json.loads(copied.pipe(*TRAIN).stdout)["run"]
    wait_for(lambda: "train" in copied.latest.read().steps)
    os.kill(int(copied.latest.read().steps["train"].owner.split()[1]), signal.SIGTERM)
    stderr = copied.pipe("attach", expect=130).stderr
    assert stderr == f"error: run {run_id}: train is interrupted; `pipe run --resume {run_id}` continues\n"


def test_a_command_that_never_began_shows_its_error(copied: ProjectFolder) -> None:
    done = copied.pipe("run", "all", "train.epohcs=1", "--detach", expect=2)
    assert "epohcs" in done.stderr
    assert not list(copied.runs.glob(".detached*"))
    assert "was not started by `pipe run --detach`" in copied.pipe("attach", expect=2).stderr
