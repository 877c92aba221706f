"""Steps on the API server of the tests: engines for them, and what they said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from k8s.cluster.rollout_status import Ending
from k8s.objects.jobs import Work, work
from k8s.step_runner import Engine
from pipeline.contract.config import Config

IMAGE = f"registry.test/twice@sha256:{'0' * 64}"
Start = Callable[..., Engine]


class Witness:
    """What the engine said, and an event for each sentence that is waited for."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.on: dict[str, Callable[[], None]] = {}

    def __call__(self, text: str) -> None:
        self.said.append(text)
        for part in [part for part in self.on if part in text]:
            self.on.pop(part)()


def worked(
    configure: Callable[..., Config],
    step: str,
    key: str = "k" * 64,
    cluster: dict[str, Any] | None = None,
    **train: Any,
) -> Work:
    config = configure(train={"image": IMAGE, **train}, cluster=cluster)
    module = "pipeline.training.node" if step == "train" else f"pipeline.steps.{step}"
    return work(config, step, "run-1", key, ("python", "-m", module, "runs/run-1"), {"PYTHONSAFEPATH": "1"})


def run(engine: Engine) -> Ending:
    engine.start()
    found = engine.follow()
    engine.remove()
    return found


def logged(engine: Engine) -> list[str]:
    return engine.log.read_text().splitlines()


def logged_by(engine: Engine) -> list[str]:
    return logged(engine) if engine.log.exists() else []
