"""User code that calls input() in training fails, in every process that a launcher starts."""

from __future__ import annotations

import contextlib
import os
import time

import pytest

from pipeline.executors.local import LocalLauncher, fork_server
from pipeline.training.launchers import launch_command
from tests.quick import quick

from .conftest import Project, failure
from .launching import ENVIRONMENT, module

IN_LOSS = "    def loss(self, outputs, batch):\n"


@pytest.mark.parametrize("forks", quick([True], [True, False]))
def test_input_in_training_fails_with_its_line(project: Project, forks: bool) -> None:
    project.replace(IN_LOSS, IN_LOSS + "        input()\n")
    (project.root / "codec.py").write_text("class C: ...\n")
    run, deadline = project.run(restarts=0), time.monotonic() + 300
    argv = launch_command(run.config.train, 1, module(run))

    def tick() -> None:
        assert time.monotonic() < deadline, "it waits for input"

    env = {**os.environ, **ENVIRONMENT}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(fork_server(project.root, env, run.config)) if forks else {}
        assert bool(server) is forks
        launcher = LocalLauncher(project.root, tick, grace_seconds=0, forks=forks)
        assert launcher.launch(argv, project.root / "log", {**ENVIRONMENT, **server}) != 0
    assert "standard input of a step is empty" in str(failure(run))
    assert str(failure(run)).endswith("(task.py, line 20)")
