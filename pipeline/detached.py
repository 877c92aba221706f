"""Runs that outlive their terminal: `pipe run --detach` starts one in the background, `pipe attach` follows it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pipeline.contract.errors import ConfigError, GateError, Interrupted, StageError
from pipeline.contract.run import Run, RunFile, all_runs, is_alive, own_identity
from pipeline.history import Project

OUTPUT_VARIABLE = "PIPE_DETACHED_OUTPUT"  # where the background command writes until it has a run
_LOG = "pipe"  # name of the log with what the command prints
_POLL_SECONDS = 0.1


def start_detached(project: Project, argv: Sequence[str]) -> Run:
    """Start `pipe` with these arguments in a session of its own; return its run as soon as it has one."""
    project.runs.mkdir(parents=True, exist_ok=True)
    output = project.runs / f".detached-{os.getpid()}.log"
    environment = {**os.environ, OUTPUT_VARIABLE: str(output)}
    with output.open("w+") as file:
        command = subprocess.Popen(
            [sys.executable, "-m", "pipeline", *argv],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        while output.exists():
            if command.poll() is not None:
                file.seek(0)
                sys.stderr.write(file.read())
                output.unlink()
                sys.exit(command.returncode)
            time.sleep(_POLL_SECONDS)
        written = os.fstat(file.fileno())
    logs = ((run, run.log(_LOG)) for run in all_runs(project.runs))
    return next(run for run, log in logs if log.exists() and os.path.samestat(log.stat(), written))


def adopt_output(run: Run) -> None:
    """Move what this command writes into its run, if it was started in the background."""
    if output := os.environ.pop(OUTPUT_VARIABLE, ""):
        _owner_file(run).write_text(own_identity())
        Path(output).rename(run.log(_LOG))


def follow(run: Run, write: Callable[[str], object]) -> None:
    """Pass on what a command in the background prints, until it ends; raise how it ended unless all went well."""
    if not _owner_file(run).exists():
        raise ConfigError(
            f"run {run.id} was not started by `pipe run --detach`; `pipe logs --follow` prints a step's log"
        )
    owner = _owner_file(run).read_text()
    with run.log(_LOG).open(errors="replace") as log:
        while True:
            alive = is_alive(owner)
            write(log.read())
            if not alive:
                break
            time.sleep(_POLL_SECONDS)
    _raise_failure(run, run.read())


def _owner_file(run: Run) -> Path:
    return run.path / "logs" / "pipe.owner"


def _raise_failure(run: Run, body: RunFile) -> None:
    errors = {"rejected": GateError, "interrupted": Interrupted}
    for step in body.wanted:
        record = body.steps.get(step)
        if record is None or not record.complete:
            status = "missing" if record is None else record.current_status
            raise errors.get(status, StageError)(
                f"run {run.id}: {step} is {status}; `pipe run --resume {run.id}` continues"
            )
