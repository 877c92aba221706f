"""Where a step runs: as a process here, or as a Job on a cluster; both end with an exit status and leave a log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from pipeline.launch import step_environment
from pipeline.outcome import exit_status
from pipeline.plan import Step
from pipeline.spec.config import Config
from pipeline.spec.run import Run, StepRecord

Say = Callable[[str], None]
Ask = Callable[[str], bool]


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
    from pipeline.on_cluster import OnCluster  # others do without the manifests

    return OnCluster(root, say, ask)


def pod_environment() -> dict[str, str]:
    """Of a step in a pod; its threads are counted there."""
    environment = step_environment(1, 1)
    del environment["OMP_NUM_THREADS"]
    return environment
