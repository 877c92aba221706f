from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from .project_folder import ProjectFolder, wait_for


@pytest.fixture
def fresh(tmp_path: Path) -> ProjectFolder:
    return ProjectFolder.create(tmp_path / "sides")


@pytest.fixture
def tight(fresh: ProjectFolder) -> Iterator[tuple[ProjectFolder, tuple[str, ...], Path]]:
    """A project whose runs are on a small private file system: the project, the prefix to enter it, and its path."""
    if os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("nsenter"):
        pytest.skip("a file system of one's own needs root, unshare and nsenter")
    fresh.runs.mkdir()
    script = f"mount -t tmpfs -o size=3m tmpfs '{fresh.runs}' && echo mounted && exec sleep 600"
    keeper = subprocess.Popen(
        ["unshare", "-m", "sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert keeper.stdout is not None
    answer = keeper.stdout.readline()
    try:
        if answer != "mounted\n":
            pytest.skip(f"no file system can be mounted here: {answer.strip()}")
        inside = ("nsenter", f"--target={keeper.pid}", "--mount", f"--wd={fresh.folder}")
        yield fresh, inside, Path(f"/proc/{keeper.pid}/root{fresh.runs}")
    finally:
        keeper.kill()
        keeper.communicate()


@pytest.mark.long
def test_training_resumes_after_a_full_disk(tight: tuple[ProjectFolder, tuple[str, ...], Path]) -> None:
    project, inside, runs = tight
    filler = runs / "filler"
    project.pipe("run", "prepare", prefix=inside)
    filler.write_bytes(bytes((1 << 20) + (1 << 19)))
    # Each checkpoint of this wider model takes about half of what is left.
    project.replace("task.py", "nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.05), nn.Linear(64, 2)",
                   "nn.Linear(2, 9000), nn.ReLU(), nn.Linear(9000, 2)")  # fmt: skip
    output = project.pipe("run", "train", "train.epochs=4", "train.processes=1", prefix=inside, expect=2).stderr
    last = output.splitlines()[-1]
    assert f"disk full on {socket.gethostname()} while writing the checkpoint of step" in last
    assert "free some space, then `pipe run --resume`" in last
    assert "Traceback" not in output
    filler.unlink()
    assert "resumed from the checkpoint of step" in project.pipe("run", "--resume", prefix=inside).stderr
    assert wait_for(lambda: list(runs.glob("*/train/model.safetensors")))


@pytest.mark.long
def test_plan_tries_the_pipeline_and_refuses_export_settings_that_the_task_cannot_have(fresh: ProjectFolder) -> None:
    with (fresh.folder / "task.py").open("a") as task:
        task.write("\nimport os\nopen('parents', 'a').write(f'{os.getppid()}\\n')\n")
    planned = fresh.pipe("plan", "--check", "export.variants=[int4]", expect=2)
    parents = (fresh.folder / "parents").read_text().split()
    assert (len(parents), len(set(parents))) == (2, 1), "both processes come from one that has imported torch"
    assert "never run" in planned.stdout
    assert "export.variants: int4 is not for this model; use int8-dynamic or int8-static\n" in planned.stderr
