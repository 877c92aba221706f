"""A copy of the tiny project and the commands typed in it, as processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from pipeline.contract.run import Run, all_runs
from pipeline.service.process import any_port, end, read_live, request

TINY = Path(__file__).resolve().parents[1] / "project"
PIPE = (sys.executable, "-m", "pipeline")
_LIMIT_SECONDS = 120


@dataclass(frozen=True)
class Walker:
    """One project folder with a port of its own."""

    folder: Path
    port: int

    @classmethod
    def beside(cls, folder: Path) -> Walker:
        return cls(folder, free_pair())

    @classmethod
    def fresh(cls, folder: Path) -> Walker:
        shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("__pycache__", ".mypy_cache"))
        walker = cls.beside(folder)
        walker.replace("pipe.yaml", "package:", f"deploy:\n  port: {walker.port}\n\npackage:")
        return walker

    @classmethod
    def of(cls, folder: Path) -> Walker:
        """Of a project that another one has made fresh."""
        return cls(folder, yaml.safe_load((folder / "pipe.yaml").read_text())["deploy"]["port"])

    @staticmethod
    def lives_in(folder: Path) -> bool:
        live = read_live(folder / "runs")
        return live is not None and live.alive

    def copy(self, folder: Path) -> Walker:
        """The project and its runs elsewhere, as if nothing were live."""
        shutil.copytree(self.folder, folder, ignore=shutil.ignore_patterns("__pycache__", "live.json", ".lock"))
        walker = self.beside(folder)
        walker.replace("pipe.yaml", f"port: {self.port}", f"port: {walker.port}")
        return walker

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
        seconds: float = _LIMIT_SECONDS,
    ) -> subprocess.CompletedProcess[str]:
        """Type a command and wait for its end."""
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

    def deploy(
        self, run: Run, expect: int = 0, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """The bundle of a run, on this walker's own port and not the one the run was made with."""
        return self.pipe("deploy", run.id, f"deploy.port={self.port}", expect=expect, env=env)

    @contextlib.contextmanager
    def held(self, after: int, *words: str) -> Iterator[subprocess.Popen[str]]:
        """A command under way whose training waits after so many steps; the hold is lifted at the end."""
        hold = self.folder / "hold"
        hold.write_text(str(after))
        process = subprocess.Popen(
            [*PIPE, *words],
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
        """Action and reason of each step."""
        rows = json.loads(self.pipe("plan", *words, "-o", "json").stdout)
        return {row["name"]: (row["action"], row["reason"]) for row in rows}

    def stop(self) -> None:
        """End the service, however the test went."""
        live = read_live(self.runs)
        if live is not None:
            end(live.pid, live.process_started, grace_seconds=5)

    def ask(self, path: str, body: Any = None) -> tuple[int, Mapping[str, str], Any]:
        live = read_live(self.runs)
        assert live is not None
        return request(live.host, live.port, "GET" if body is None else "POST", path, body)


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """As in a shell: nothing of pytest, plain text, a wide terminal."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PIPE_", "FORCE_"))}
    return {**kept, "NO_COLOR": "1", "COLUMNS": "200", **variables}


def free_pair() -> int:
    """A port that is free together with the next one, which gRPC takes."""
    while True:
        port = any_port()
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def wait_for(what: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Poll until it is truthy, and return it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := what():
            return found
        time.sleep(0.02)
    raise AssertionError(f"nothing came of waiting {seconds:.0f} s for {what}")


def processes_of(run: Run) -> list[psutil.Process]:
    """Whoever works on a run: its node, agent and workers, any step, all of which are called with its name."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if run.id in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def workers_of(run: Run) -> list[psutil.Process]:
    """The training processes themselves, by rank as far as they were started in that order."""
    return called(run, "train")


def called(run: Run, module: str) -> list[psutil.Process]:
    """Those that run `python -m module`."""
    return [process for process in processes_of(run) if process.cmdline()[1:3] == ["-m", module]]
