"""The process of a step: started, started again where that may help, and what its end means."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path

from pipeline.killed import killed_process
from pipeline.launch import LocalLauncher, count_gpus, step_environment
from pipeline.spec.attempts import read_story, tell_end
from pipeline.spec.errors import PipelineError, ResourceError, StageError, read_error
from pipeline.spec.failure import ending
from pipeline.spec.restarts import Stop, decide
from pipeline.spec.run import Run, StepRecord
from pipeline.steps import AGAIN, processes_per_node

_NO_SPACE_BYTES = 1 << 20


def exit_status(root: Path, run: Run, record: StepRecord, cores: int, tick: Callable[[], None]) -> int:
    """Of the step's process. The node of training begins again when somebody kills it, as those it starts do."""
    train, log = run.config.train, run.log(record.step)
    processes = processes_per_node(train, count_gpus(os.environ)) if record.step == "train" else 1
    environment = step_environment(processes, cores or os.cpu_count() or 1)
    launcher = LocalLauncher(root, tick)
    status = launcher.launch(record.argv, log, environment)
    while record.step == "train" and status == -signal.SIGKILL:
        host = socket.gethostname()
        tell_end(run.path, host=host, reason=ending(f"the node on {host}", status))
        if isinstance(decide(read_story(run.path), train.restarts), Stop):
            break
        status = launcher.launch((*record.argv, AGAIN), log, environment)
    return status


def failure(run: Run, step: str, status: int, said: str) -> PipelineError | None:
    """The cause first, as a process left it or as the launcher says; then what those saw who lost contact."""
    if status == 0:
        return _missing(run, step)
    error = read_error(run.partial(step))
    if (error is None or error.echo) and (killed := killed_process(said)):
        return StageError(f"{step}: {killed}")
    if error is not None:
        return type(error)(f"{step}: {error}")
    if shutil.disk_usage(run.path).free < _NO_SPACE_BYTES:
        return ResourceError(f"{step}: disk full under {run.path}; free some space, then `pipe run --resume`")
    how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
    return StageError(f"{step}: its process {how} and left no reason")


def _missing(run: Run, step: str) -> PipelineError | None:
    """A machine that trained along with others and keeps its own run directory has no model in it."""
    if step != "train" or (run.partial(step) / "model.safetensors").is_file():
        return None
    return StageError(
        "train: this machine has no model, the first process ran on another one; all machines must share the run "
        "directory, and only one of them runs `pipe` (docs/training.md, Launching)"
    )
