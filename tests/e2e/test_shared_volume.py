"""Machines train together on a volume without file locks and hard links, as some clusters have."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from pipeline.contract.restarts import read_attempts
from tests.ports import free_port

from .project_folder import PIPE, ProjectFolder, environment, wait_for

VOLUME = (
    "strace", "-f", "--seccomp-bpf", "-qqq", "-o", "/dev/null", "-e", "trace=flock,link,linkat",
    "-e", "inject=flock:error=ENOSYS", "-e", "inject=link,linkat:error=EPERM",
)  # fmt: skip


@pytest.mark.long
@pytest.mark.skipif(shutil.which("strace") is None, reason="no strace here, which answers as such a volume does")
def test_machines_train_together_without_locks_and_links(
    copied: ProjectFolder, expected: bytes, tmp_path: Path
) -> None:
    words = (
        "run", "train", "--force", "train", "train.nodes=2", "train.processes=1", "train.timeout_seconds=60",
        f"train.rendezvous=127.0.0.1:{free_port()}",
    )  # fmt: skip
    known, output = copied.latest.id, tmp_path / "join.txt"
    with copied.paused_training(1000, *words, prefix=VOLUME) as pipe:
        wait_for(lambda: copied.latest.id != known)
        run = copied.latest
        wait_for(lambda: (run.path / "logs" / "train.log").exists())
        with output.open("wb") as file:
            other = subprocess.Popen(
                [*VOLUME, *PIPE, "join", run.id], cwd=copied.folder, env=environment({}), stdin=subprocess.DEVNULL,
                stdout=file, stderr=subprocess.STDOUT,
            )  # fmt: skip
        _, stderr = pipe.communicate(timeout=300)
    assert pipe.returncode == 0, stderr
    assert other.wait(timeout=300) == 0, output.read_text()
    assert stderr.count("this file system has no locks") == 1
    assert [len(attempt.hosts) for attempt in read_attempts(run.path).attempts] == [2]
    assert copied.weights == expected
    copied.pipe("verify", run.id)
    for command in (("status",), ("plan",), ("run", "--resume", run.id)):
        copied.pipe(*command, prefix=VOLUME)
    refusal = copied.pipe("gc", "--keep", "1", prefix=VOLUME, expect=2).stderr
    assert refusal.startswith(f"error: {copied.runs}: this file system has no locks, so that a run in use")
