"""The logs of all pods of a step: each kept in a file of its own, and all of them together as they come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from k8s.api import Connection
from k8s.job_state import over, rank_of, started
from k8s.manifest import Object
from k8s.podlog import PodLog


@dataclass
class PodLogs:
    connection: Connection
    namespace: str
    container: str  # ours: a mesh may put others beside it
    several: bool  # pods, told apart by their rank
    folder: Path  # keeps what each pod said
    log: Path  # what they all say
    say: Callable[[str], None]
    _followed: dict[str, PodLog] = field(default_factory=dict)
    _writing: threading.Lock = field(default_factory=threading.Lock)
    _said: str = ""

    def follow(self, pods: Mapping[str, Object]) -> None:
        """Those that have begun to say something; of those that are over or gone, what is left of it."""
        for name, pod in pods.items():
            if name not in self._followed and started(pod):
                tell = self._marked(f"[{rank_of(pod)}] " if self.several else "")
                file = self.folder / f"{name}.log"
                self._followed[name] = PodLog(self.connection, self.namespace, name, self.container, file, tell)
        for name, log in self._followed.items():
            if name not in pods or over(pods[name]):
                log.pod_is_over()
        self._tell_refusals(self._followed.values())

    def wait_for_answers(self, seconds: float) -> None:
        """All of them together no longer than this."""
        deadline = time.monotonic() + seconds
        for log in self._followed.values():
            log.wait_for_an_answer(max(0.0, deadline - time.monotonic()))

    def finish(self) -> None:
        """No pod says anything any more."""
        for log in self._followed.values():
            log.pod_is_over()

    def close(self, seconds: float) -> None:
        """Wait for what is left, all of them together no longer than this."""
        deadline = time.monotonic() + seconds
        while self._followed:
            log = self._followed.popitem()[1]
            log.close(max(0.0, deadline - time.monotonic()))
            self._tell_refusals([log])

    def _tell_refusals(self, logs: Iterable[PodLog]) -> None:
        """Once: what one pod's log is refused for, the others' are as well."""
        refused = next((log.refused for log in logs if log.refused), "")
        if refused and not self._said:
            self.say(f"warning: {refused}")
            self._said = refused

    def _marked(self, mark: str) -> Callable[[str], None]:
        return lambda line: self._write(f"{mark}{line}")

    def _write(self, line: str) -> None:
        with self._writing, self.log.open("ab") as file:
            file.write(line.encode() + b"\n")
