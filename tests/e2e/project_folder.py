"""A copy of the project in tests/project, and the commands run in it as processes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import yaml
from typer.testing import CliRunner

from pipeline.cli import app, main
from pipeline.contract.run import Run, all_runs
from pipeline.service.process import read_live, send_request, stop_process
from tests.plans import fixed_memory_estimate
from tests.ports import free_port

TINY = Path(__file__).resolve().parents[1] / "project"
PIPE = (sys.executable, "-m", "pipeline")
HELD_AFTER = 57  # steps; epochs end, and checkpoints are written, at 25 and 50
_TIMEOUT_SECONDS = 1800  # only a hang takes this long
_READERS = ("status", "verify", "plan", "compare", "report", "logs", "gate")  # run in this process


@dataclass(frozen=True)
class ProjectFolder:
    """A project folder with its own port."""

    folder: Path
    port: int

    @classmethod
    def with_free_port(cls, folder: Path) -> ProjectFolder:
        return cls(folder, free_port())

    @classmethod
    def create(cls, folder: Path) -> ProjectFolder:
        shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("__pycache__", ".mypy_cache"))
        project = cls.with_free_port(folder)
        project.replace("pipe.yaml", "package:", f"deploy:\n  port: {project.port}\n\npackage:")
        return project

    @classmethod
    def existing(cls, folder: Path) -> ProjectFolder:
        """Open a project that was created before."""
        return cls(folder, yaml.safe_load((folder / "pipe.yaml").read_text())["deploy"]["port"])

    @staticmethod
    def has_live_service(folder: Path) -> bool:
        live = read_live(folder / "runs")
        return live is not None and live.alive

    def copy(self, folder: Path) -> ProjectFolder:
        """Copy the project and its runs, without the live service."""
        shutil.copytree(self.folder, folder, ignore=shutil.ignore_patterns("__pycache__", "live.json", ".lock"))
        project = self.with_free_port(folder)
        project.replace("pipe.yaml", f"port: {self.port}", f"port: {project.port}")
        return project

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    @property
    def latest(self) -> Run:
        return all_runs(self.runs)[0]

    @property
    def weights(self) -> bytes:
        return (self.latest.output("train") / "model.safetensors").read_bytes()

    @property
    def checkpoints(self) -> Path:
        return self.latest.partial("train") / "checkpoints"

    def replace(self, file: str, old: str, new: str) -> None:
        text = (self.folder / file).read_text()
        assert old in text
        (self.folder / file).write_text(text.replace(old, new))

    def pipe(
        self,
        *words: str,
        expect: int = 0,
        prefix: tuple[str, ...] = (),
        env: Mapping[str, str] | None = None,
        seconds: float = _TIMEOUT_SECONDS,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; one that starts no process runs in this one, which has imported everything."""
        if words[0] in _READERS and not prefix and not env:
            done = self._run_here(*words)
            assert done.returncode == expect, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
            return done
        done = subprocess.run(
            [*prefix, *PIPE, *words],
            cwd=self.folder,
            env=environment(env or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert done.returncode == expect, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def _run_here(self, *words: str) -> subprocess.CompletedProcess[str]:
        stdout, stderr, status = io.StringIO(), io.StringIO(), 0
        with (
            contextlib.chdir(self.folder),
            contextlib.redirect_stdout(stdout),
            contextlib.redirect_stderr(stderr),
            mock.patch.dict(os.environ, environment({}), clear=True),
            mock.patch("sys.argv", ["pipe", *words]),
            mock.patch("pipeline.cli.watch_parent"),
            mock.patch("pipeline.cli.signal.signal"),
        ):
            try:
                main()
            except SystemExit as end:
                status = int(end.code or 0)
        return subprocess.CompletedProcess(["pipe", *words], status, stdout.getvalue(), stderr.getvalue())

    @contextlib.contextmanager
    def served(self, **options: Any) -> Iterator[None]:
        """Run the whole pipeline, without building an image; the service is stopped at the end."""
        try:
            self.pipe("run", "all", "package.builder=none", f"deploy.port={self.port}", **options)
            yield
        finally:
            self.stop()

    def deploy(
        self, run: Run, expect: int = 0, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Deploy the bundle of a run on this project's port, not the one the run was made with."""
        return self.pipe("deploy", run.id, f"deploy.port={self.port}", expect=expect, env=env)

    @contextlib.contextmanager
    def paused_training(self, after: int, *words: str, prefix: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[str]]:
        """Run a command whose training pauses after a number of steps, until the block ends."""
        hold = self.folder / "hold"
        hold.write_text(str(after))
        process = subprocess.Popen(
            [*prefix, *PIPE, *words],
            cwd=self.folder,
            env=environment({}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            yield process
        finally:
            hold.unlink()
            if process.poll() is None:
                process.kill()
            process.communicate()

    def plan(self, *words: str) -> dict[str, tuple[str, str]]:
        """Return action and reason of each step, without starting a process."""
        argv = ["-C", str(self.folder), "plan", *words, "-o", "json"]
        with fixed_memory_estimate():
            done = CliRunner().invoke(app, argv, catch_exceptions=False)
        rows = json.loads(done.stdout)
        return {row["name"]: (row["action"], row["reason"]) for row in rows}

    def stop(self) -> None:
        """Stop the service, if there is one."""
        live = read_live(self.runs)
        if live is not None:
            stop_process(live.pid, live.process_started, grace_seconds=5)

    def request(self, path: str, body: Any = None) -> tuple[int, Mapping[str, str], Any]:
        live = read_live(self.runs)
        assert live is not None
        return send_request(live.host, live.port, "GET" if body is None else "POST", path, body)


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a shell: nothing of pytest, plain text, a wide terminal."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PIPE_", "FORCE_"))}
    return {**kept, "NO_COLOR": "1", "COLUMNS": "200", **variables}


def wait_for(condition: Callable[[], Any], seconds: float = 300.0) -> Any:
    """Poll until the condition is true, and return its value; the timeout is only for a hang."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"still false after {seconds:.0f} s: {condition}")


def until_held(project: ProjectFolder) -> Run:
    """Wait until a training that has just been started wrote the last checkpoint before HELD_AFTER; return its run."""
    known = project.latest.id
    wait_for(lambda: project.latest.id != known)
    wait_for((project.checkpoints / "step-00000050" / "manifest.json").exists)
    return project.latest


def processes_of(run: Run) -> list[psutil.Process]:
    """Return the processes of a run, which all have its name in their command: node, agent, workers, other steps."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if run.id in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def workers_of(run: Run) -> list[psutil.Process]:
    """Return the training processes, in the order in which they were started."""
    return running_module(run, "train")


def running_module(run: Run, module: str) -> list[psutil.Process]:
    """Return the processes of a run that run `python -m module`."""
    return [process for process in processes_of(run) if process.cmdline()[1:3] == ["-m", module]]
