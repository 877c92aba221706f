"""One deployment of a model at a time: a Lease on the cluster, renewed while it is held, told who holds it."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from k8s.api import Connection, path_of
from k8s.manifest import Object
from k8s.refusal import refusal
from pipeline.spec.errors import PipelineError, ResourceError

_LEASE = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
_SECONDS = 30  # without a renewal its holder is gone
_RENEW_SECONDS = 8.0
_CONFLICT = 409


@dataclass(frozen=True)
class Lease:
    connection: Connection
    namespace: str
    name: str
    holder: str
    poll_seconds: float = 0.5
    lasts_seconds: int = _SECONDS

    @contextlib.contextmanager
    def held(self, wait_seconds: float, say: Callable[[str], None]) -> Iterator[Callable[[], None]]:
        """Yields what raises when it is lost, to be called before anything is changed."""
        self._take(wait_seconds, say)
        stop, lost = threading.Event(), threading.Event()
        renewing = threading.Thread(target=self._renew, args=(stop, lost), name=f"lease {self.name}", daemon=True)
        renewing.start()

        def check() -> None:
            if lost.is_set():
                raise ResourceError(f"lease/{self.name}: somebody else took it; nothing more is changed")

        try:
            yield check
        finally:
            stop.set()
            renewing.join()
            if not lost.is_set():
                self._give_back(say)

    def _take(self, wait_seconds: float, say: Callable[[str], None]) -> None:
        """An old renewal may be of another clock: what counts is how long it stays the same before our eyes."""
        deadline, said = time.monotonic() + wait_seconds, ""
        seen, since = "", time.monotonic()
        while True:
            live = self._read()
            owner = live["spec"].get("holderIdentity") if live else ""
            version = live["metadata"]["resourceVersion"] if live else ""
            if version != seen:
                seen, since = version, time.monotonic()
            lasts = live["spec"].get("leaseDurationSeconds", self.lasts_seconds) if live else 0
            if (not owner or time.monotonic() - since > lasts) and self._write(live, self.holder):
                return
            if owner and time.monotonic() >= deadline:
                raise ResourceError(
                    f"{owner} is deploying {self.name.removesuffix('-deploy')} in namespace {self.namespace}; waited "
                    f"{wait_seconds:g} s for it (rollout.wait_seconds)"
                )
            if owner and owner != said:
                say(f"{owner} is deploying here; waiting for it, {wait_seconds:g} s at most")
                said = owner
            time.sleep(self.poll_seconds)

    def _renew(self, stop: threading.Event, lost: threading.Event) -> None:
        """What cannot be renewed in time is not ours any more."""
        renewed = time.monotonic()
        while not stop.wait(min(_RENEW_SECONDS, self.lasts_seconds / 3)):
            with contextlib.suppress(PipelineError):  # the next try may succeed, and the time runs
                live = self._read()
                if live is None or live["spec"].get("holderIdentity") != self.holder:
                    break
                if self._write(live, self.holder):
                    renewed = time.monotonic()
            if time.monotonic() - renewed > self.lasts_seconds:
                break
        if not stop.is_set():
            lost.set()

    def _give_back(self, say: Callable[[str], None]) -> None:
        """What went wrong before is what is to be told; a lease that stays runs out by itself."""
        try:
            live = self._read()
            if live is not None and live["spec"].get("holderIdentity") == self.holder:
                self._write(live, "")
        except PipelineError as error:
            say(f"warning: lease/{self.name} runs out by itself, in {self.lasts_seconds} s: {error}")

    def _read(self) -> Object | None:
        answer = self.connection.request("GET", path_of(_LEASE, self.namespace, self.name))
        if answer.status == 404:
            return None
        if not answer.ok:
            raise refusal(answer, f"lease/{self.name}", self.namespace, _LEASE["apiVersion"])
        found: Object = answer.json()
        return found

    def _write(self, live: Object | None, holder: str) -> bool:
        """False when somebody was quicker."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec: Object = {"leaseDurationSeconds": self.lasts_seconds, "renewTime": now}
        if holder:  # an empty one is refused
            spec["holderIdentity"] = holder
        metadata: Object = {"name": self.name, "namespace": self.namespace}
        if live is not None:
            metadata["resourceVersion"] = live["metadata"]["resourceVersion"]
        body = json.dumps({**_LEASE, "metadata": metadata, "spec": spec}).encode()
        method, name = ("POST", "") if live is None else ("PUT", self.name)
        answer = self.connection.request(method, path_of(_LEASE, self.namespace, name), body=body)
        if not answer.ok and answer.status != _CONFLICT:
            raise refusal(answer, f"lease/{self.name}", self.namespace, _LEASE["apiVersion"])
        return answer.ok


def holder() -> str:
    """Who deploys, for whoever comes second to read."""
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # in a container
        name = f"user {os.getuid()}"
    return f"{name} on {socket.gethostname()} (pid {os.getpid()})"
