"""Helpers to run steps on the test API server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from k8s.cluster.rollout_status import JobResult
from k8s.objects.jobs import StepJob, step_job
from k8s.step_runner import StepRunner
from pipeline.contract.config import Config

from .mock_pods import MockPod

IMAGE = f"registry.test/twice@sha256:{'0' * 64}"
MakeStepRunner = Callable[..., StepRunner]


class Reports:
    """Collects reported lines; `on` has callbacks for texts that a test waits for."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.on: dict[str, Callable[[], None]] = {}

    def __call__(self, text: str) -> None:
        self.lines.append(text)
        for part in [part for part in self.on if part in text]:
            self.on.pop(part)()


def make_step_job(
    configure: Callable[..., Config],
    step: str,
    key: str = "k" * 64,
    cluster: dict[str, Any] | None = None,
    **train: Any,
) -> StepJob:
    config = configure(train={"image": IMAGE, **train}, cluster=cluster)
    module = "pipeline.training.node" if step == "train" else f"pipeline.steps.{step}"
    return step_job(config, step, "run-1", key, ("python", "-m", module, "runs/run-1"), {"PYTHONSAFEPATH": "1"})


def run_step(runner: StepRunner) -> JobResult:
    runner.start()
    result = runner.follow()
    runner.remove()
    return result


def printing(*lines: str) -> Callable[[MockPod], int]:
    """Return the program of a pod that logs these lines, in which {} is its index, and succeeds."""

    def program(pod: MockPod) -> int:
        for line in lines:
            pod.log(line.format(pod.index))
        return 0

    return program


def log_lines(runner: StepRunner) -> list[str]:
    return runner.log.read_text().splitlines()


def log_lines_so_far(runner: StepRunner) -> list[str]:
    return log_lines(runner) if runner.log.exists() else []
