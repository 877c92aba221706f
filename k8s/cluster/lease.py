"""A Lease on the cluster that lets one deployment of a model run at a time, renewed as long as it is held."""

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

from k8s.cluster.api import Connection, api_path
from k8s.cluster.cluster import read_object
from k8s.cluster.errors import api_error
from k8s.objects.kustomize import Object
from pipeline.system.errors import PipelineError, ResourceError
from pipeline.system.wording import number

LEASE_TIMEOUT_SECONDS = 120  # longest wait for another deployment of the same model

_LEASE = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
_DURATION_SECONDS = 30  # a holder that has not renewed for this long is gone
_RENEW_SECONDS = 8.0
_HTTP_CONFLICT = 409


@dataclass(frozen=True)
class Lease:
    connection: Connection
    namespace: str
    name: str
    holder: str
    poll_seconds: float = 0.5
    duration_seconds: int = _DURATION_SECONDS
    renew_seconds: float = _RENEW_SECONDS

    @contextlib.contextmanager
    def hold(self, wait_seconds: float, report: Callable[[str], None]) -> Iterator[Callable[[], None]]:
        """Hold the lease; yield a function that raises once it is lost, to be called before each change."""
        self._acquire(wait_seconds, report)
        stop, lost = threading.Event(), threading.Event()
        renewing = threading.Thread(target=self._renew, args=(stop, lost), name=f"lease {self.name}", daemon=True)
        renewing.start()

        def check() -> None:
            if lost.is_set():
                raise ResourceError(f"lease/{self.name}: another process took it; nothing more is changed")

        try:
            yield check
        finally:
            stop.set()
            renewing.join()
            if not lost.is_set():
                self._release(report)

    def _acquire(self, wait_seconds: float, report: Callable[[str], None]) -> None:
        """Wait until the lease is free, or has not changed for its duration.

        The holder's clock may differ from ours, so the time of its last update is not read.
        """
        deadline, reported = time.monotonic() + wait_seconds, ""
        version, unchanged_since = "", time.monotonic()
        while True:
            live = self._read()
            owner = live["spec"].get("holderIdentity") if live else ""
            live_version = live["metadata"]["resourceVersion"] if live else ""
            if live_version != version:
                version, unchanged_since = live_version, time.monotonic()
            duration = live["spec"].get("leaseDurationSeconds", self.duration_seconds) if live else 0
            if (not owner or time.monotonic() - unchanged_since > duration) and self._write(live, self.holder):
                return
            if owner and owner != reported:
                report(f"{owner} is deploying here; waiting for it, {number(wait_seconds)} s at most")
                reported = owner
            if owner and time.monotonic() >= deadline:
                raise ResourceError(
                    f"{owner} is deploying {self.name.removesuffix('-deploy')} in namespace {self.namespace}; waited "
                    f"{number(wait_seconds)} s for it"
                )
            time.sleep(self.poll_seconds)

    def _renew(self, stop: threading.Event, lost: threading.Event) -> None:
        """Renew until stopped; a lease that could not be renewed in time is lost."""
        renewed_at = time.monotonic()
        while not stop.wait(min(self.renew_seconds, self.duration_seconds / 3)):
            with contextlib.suppress(PipelineError):  # the next attempt may succeed before the lease expires
                live = self._read()
                if live is None or live["spec"].get("holderIdentity") != self.holder:
                    break
                if self._write(live, self.holder):
                    renewed_at = time.monotonic()
            if time.monotonic() - renewed_at > self.duration_seconds:
                break
        if not stop.is_set():
            lost.set()

    def _release(self, report: Callable[[str], None]) -> None:
        """Give the lease back; a failure is only a warning, since it expires and may follow another error."""
        try:
            live = self._read()
            if live is not None and live["spec"].get("holderIdentity") == self.holder:
                self._write(live, "")
        except PipelineError as error:
            report(f"warning: lease/{self.name} expires by itself, in {self.duration_seconds} s: {error}")

    def _read(self) -> Object | None:
        return read_object(self.connection, {**_LEASE, "metadata": {"name": self.name}}, self.namespace)

    def _write(self, live: Object | None, holder: str) -> bool:
        """Return False if another process was faster."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec: Object = {"leaseDurationSeconds": self.duration_seconds, "renewTime": now}
        if holder:  # the API refuses an empty one
            spec["holderIdentity"] = holder
        metadata: Object = {"name": self.name, "namespace": self.namespace}
        if live is not None:
            metadata["resourceVersion"] = live["metadata"]["resourceVersion"]
        body = json.dumps({**_LEASE, "metadata": metadata, "spec": spec}).encode()
        method, name = ("POST", "") if live is None else ("PUT", self.name)
        response = self.connection.request(method, api_path(_LEASE, self.namespace, name), body=body)
        if not response.ok and response.status != _HTTP_CONFLICT:
            raise api_error(response, f"lease/{self.name}", self.namespace, _LEASE["apiVersion"])
        return response.ok


def holder_identity() -> str:
    """Return user, host and process, for others who wait for the lease to read."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # in a container
        user = f"user {os.getuid()}"
    return f"{user} on {socket.gethostname()} (pid {os.getpid()})"
