"""Run commands, in this process where possible: starting one costs half a second."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.cli import main
from pipeline.history import example_folder

from ...plans import fixed_memory_estimate

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
def pipe(starter: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipe]:
    """Run a command in the project and expect an exit status; plans have a fixed estimate of memory."""
    with fixed_memory_estimate():
        yield run_here(starter, monkeypatch)


@pytest.fixture
def pipe_with_estimate(starter: Path, monkeypatch: pytest.MonkeyPatch) -> Pipe:
    """Run a command in the project; plans estimate the memory of training."""
    return run_here(starter, monkeypatch)


def run_here(starter: Path, monkeypatch: pytest.MonkeyPatch) -> Pipe:
    monkeypatch.setattr("pipeline.cli.watch_parent", lambda: None)
    monkeypatch.setattr("pipeline.cli.signal.signal", lambda *_: None)

    def run(*words: str, expect: int | None = 0, here: Path = starter) -> subprocess.CompletedProcess[str]:
        stdout, stderr = io.StringIO(), io.StringIO()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["pipe", *words])
            patch.chdir(here)
            with (
                contextlib.redirect_stdout(stdout),
                contextlib.redirect_stderr(stderr),
                pytest.raises(SystemExit) as end,
            ):
                main()
        status = int(end.value.code or 0)
        assert expect in (status, None), f"exit status {status}\n{stdout.getvalue()}\n{stderr.getvalue()}"
        return subprocess.CompletedProcess(["pipe", *words], status, stdout.getvalue(), stderr.getvalue())

    return run


@pytest.fixture
def pipe_process(starter: Path) -> Pipe:
    """Run a command in a new process."""

    def run(*words: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "NO_COLOR": "1", "COLUMNS": "200"}
        command = [sys.executable, "-m", "pipeline", *words]
        done = subprocess.run(command, cwd=starter, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == expect, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run
