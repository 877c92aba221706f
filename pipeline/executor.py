"""Choose where a step runs, as a process on this machine or as a Job on a cluster, and find out why it failed."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from pipeline.contract.config import Config
from pipeline.contract.errors import PipelineError, ResourceError, StageError, read_error
from pipeline.contract.extras import missing_extra_in_log
from pipeline.contract.processes import describe_exit
from pipeline.contract.restarts import GiveUp, ProcessEnd, restart_after
from pipeline.contract.run import Run, StepRecord
from pipeline.plan import CLUSTER_STEPS, RESTARTED_FLAG, Step, processes_per_node
from pipeline.processes import Ask, LocalLauncher, Report, count_gpus, find_killed_process, step_environment

_DISK_FULL_BYTES = 1 << 20


class Executor(Protocol):
    def is_running(self, run: Run, step: Step) -> bool:
        """True if an earlier `pipe` started this step and it still runs: then none of its files may be removed."""

    def run_step(self, run: Run, record: StepRecord, tick: Callable[[], None]) -> int:
        """Run the step to its end and return its exit status; output goes to its log, `tick` is called meanwhile."""


class LocalExecutor:
    """Runs a step as a process that ends with this one."""

    def __init__(self, root: Path, cores: int) -> None:
        self._root, self._cores = root, cores

    def is_running(self, run: Run, step: Step) -> bool:  # noqa: ARG002 - the protocol's signature
        return False

    def run_step(self, run: Run, record: StepRecord, tick: Callable[[], None]) -> int:
        """Run the process; training is started again where its node was killed, as it starts its workers again."""
        train, log = run.config.train, run.log(record.step)
        processes = processes_per_node(train, count_gpus(os.environ)) if record.step == "train" else 1
        environment = step_environment(processes, self._cores or os.cpu_count() or 1)
        launcher = LocalLauncher(self._root, tick)
        status = launcher.launch(record.argv, log, environment)
        while record.step == "train" and status == -signal.SIGKILL:
            host = socket.gethostname()
            end = ProcessEnd(host, describe_exit(f"the node on {host}", status))
            if isinstance(restart_after(run.path, end, train.restarts), GiveUp):
                break
            status = launcher.launch((*record.argv, RESTARTED_FLAG), log, environment)
        return status


def choose_executor(step: str, root: Path, config: Config, cores: int, report: Report, ask: Ask) -> Executor:
    if not runs_on_cluster(step, config):
        return LocalExecutor(root, cores)
    from pipeline.cluster_executor import ClusterExecutor  # the manifests are slow to load

    return ClusterExecutor(root, report, ask)


def runs_on_cluster(step: str, config: Config) -> bool:
    return config.cluster.executor == "kubernetes" and step in CLUSTER_STEPS


def find_failure(run: Run, step: str, status: int, log: str) -> PipelineError | None:
    """Return the cause of a failure, or None where the step succeeded.

    A process that lost contact with another one (`echo`) leaves an error, too; a killed process, which leaves none,
    is the cause then.
    """
    if status == 0:
        return _missing_model(run, step)
    error = read_error(run.partial(step))
    if (error is None or error.echo) and (killed := find_killed_process(log)):
        return StageError(f"{step}: {killed}")
    if error is None:
        error = missing_extra_in_log(log)
    if error is not None:
        return type(error)(f"{step}: {error}")
    if shutil.disk_usage(run.path).free < _DISK_FULL_BYTES:
        return ResourceError(f"{step}: disk full under {run.path}; free some space, then `pipe run --resume`")
    ending = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
    return StageError(f"{step}: its process {ending} and left no reason; its output is in {run.log(step)}")


def _missing_model(run: Run, step: str) -> PipelineError | None:
    """Return the error of a machine that trained with others but has its own run directory, with no model in it."""
    if step != "train" or (run.partial(step) / "model.safetensors").is_file():
        return None
    return StageError(
        "train: this machine has no model, the first process ran on another one; all machines must share the run "
        "directory, and only one of them runs `pipe` (docs/training.md, Launching)"
    )
