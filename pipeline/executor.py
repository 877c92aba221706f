"""Where a step runs: as a process here, or as a Job on a cluster; both end with an exit status and leave a log.

The process of a step: started, started again where that may help, and what its end means.

A step as a Job: connected, started or found again, followed, and removed; Ctrl-C asks whether to cancel it.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from pipeline.contract.attempts import Stop, decide, read_story, tell_end
from pipeline.contract.config import Config
from pipeline.contract.errors import PipelineError, ResourceError, StageError, read_error
from pipeline.contract.processes import ending
from pipeline.contract.run import Run, StepRecord
from pipeline.plan import AGAIN, Step, processes_per_node
from pipeline.processes import Ask, LocalLauncher, Say, count_gpus, killed_process, step_environment


class Executor(Protocol):
    def goes_on(self, run: Run, step: Step) -> bool:
        """Whether an earlier `pipe` started this step and it still runs, so that nothing of it may be thrown away."""

    def exit_status(self, run: Run, record: StepRecord, tick: Callable[[], None]) -> int:
        """Run the step to its end; what it says goes to its log, and `tick` is called meanwhile."""


class Here:
    """Processes end with the `pipe` that started them."""

    def __init__(self, root: Path, cores: int) -> None:
        self._root, self._cores = root, cores

    def goes_on(self, run: Run, step: Step) -> bool:  # noqa: ARG002 - the protocol's signature
        return False

    def exit_status(self, run: Run, record: StepRecord, tick: Callable[[], None]) -> int:
        return exit_status(self._root, run, record, self._cores, tick)


def is_on_cluster(step: str, config: Config) -> bool:
    return config.jobs.executor == "kubernetes" and step in config.jobs.steps


def executor_of(step: str, root: Path, config: Config, cores: int, say: Say, ask: Ask) -> Executor:
    if not is_on_cluster(step, config):
        return Here(root, cores)
    from pipeline.cluster_executor import OnCluster  # other steps do without the manifests

    return OnCluster(root, say, ask)


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
