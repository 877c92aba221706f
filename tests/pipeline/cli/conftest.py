"""The command as it is typed: a process of its own, with real streams and exit statuses."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.history import example_folder

Pipe = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def starter(tmp_path: Path) -> Path:
    """A project as `pipe init` would write it."""
    folder = tmp_path / "starter"
    folder.mkdir()
    for path in filter(Path.is_file, example_folder("starter").iterdir()):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.fixture
def pipe(starter: Path) -> Pipe:
    """Type a command in the project and expect an exit status."""

    def typed(*words: str, expect: int = 0, here: Path = starter) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "NO_COLOR": "1", "COLUMNS": "200"}
        command = [sys.executable, "-m", "pipeline", *words]
        done = subprocess.run(command, cwd=here, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == expect, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return typed
