"""The health service of gRPC (`grpc.health.v1.Health`), which probes, proxies and clients' load balancers use."""

from __future__ import annotations

from typing import Any

from serve.errors import Busy, NotFound, Unimplemented
from serve.grpc import open_inference
from serve.grpc.descriptors import ProtoFile
from serve.grpc.messages import MessageStream
from serve.models import ModelRepository

_PACKAGE = "grpc.health.v1"
FILE = ProtoFile(
    "grpc/health/v1/health.proto",
    _PACKAGE,
    """
message HealthCheckRequest
  string service = 1
message HealthCheckResponse
  ServingStatus status = 1
enum HealthCheckResponse.ServingStatus
  UNKNOWN = 0
  SERVING = 1
  NOT_SERVING = 2
  SERVICE_UNKNOWN = 3
message HealthListRequest
message HealthListResponse
  map HealthCheckResponse statuses = 1
service Health
  rpc Check HealthCheckRequest HealthCheckResponse
  rpc List HealthListRequest HealthListResponse
  rpc Watch HealthCheckRequest stream HealthCheckResponse
""",
)
SERVICE = f"{_PACKAGE}.Health"
HealthCheckRequest = FILE.message_class("HealthCheckRequest")
HealthListRequest = FILE.message_class("HealthListRequest")
_Response = FILE.message_class("HealthCheckResponse")
_ListResponse = FILE.message_class("HealthListResponse")
_SERVICES = ("", open_inference.SERVICE, SERVICE)  # "": the whole server
_MAX_WATCHERS = 256  # which need no key, and keep their connections from being closed as idle


class Health:
    """Readiness of the models, as `/v2/health/ready` reports it."""

    def __init__(self, repository: ModelRepository) -> None:
        self._repository = repository
        self._watchers: dict[Watcher, None] = {}  # the oldest first
        repository.on_readiness(self._on_drain)

    async def check(self, message: Any, _call: Any) -> Any:
        if message.service not in _SERVICES:
            names = ", ".join(_SERVICES[1:])
            raise NotFound(f"no service {message.service[:200]!r}; there are {names}, and '' for all")
        return self.status(message.service)

    async def list(self, _message: Any, _call: Any) -> Any:
        return _ListResponse(statuses={service: self.status(service) for service in _SERVICES})

    def status(self, service: str) -> Any:
        if service not in _SERVICES:
            return _Response(status="SERVICE_UNKNOWN")
        return _Response(status="SERVING" if self._repository.ready() else "NOT_SERVING")

    def add(self, watcher: Watcher) -> None:
        """Note a watcher. Of too many the oldest gives way, since no honest client minds to call again."""
        self._watchers[watcher] = None
        if self._repository.draining:
            watcher.end()
        elif len(self._watchers) > _MAX_WATCHERS:
            next(iter(self._watchers)).end(Busy("too many clients watch the health; call again"))

    def discard(self, watcher: Watcher) -> None:
        self._watchers.pop(watcher, None)

    def _on_drain(self) -> None:
        for watcher in tuple(self._watchers):
            watcher.finish()  # an open call would delay the end


class Watcher:
    """One call of `Watch`: the status now, and again when the service begins to drain."""

    def __init__(self, health: Health, stream: MessageStream) -> None:
        self._health, self._stream = health, stream
        self._service: str | None = None
        self._sent: Any = None

    def on_message(self, message: Any) -> None:
        if self._service is not None:
            raise Unimplemented("message: more than one was sent; Watch takes one")
        self._service = message.service
        self._send()
        self._health.add(self)

    def on_end(self) -> None:
        if self._service is None:
            raise Unimplemented("message: none was sent; Watch needs one")

    def finish(self) -> None:
        """Send the status for the last time."""
        try:
            self._send()
            self.end()
        except Busy as error:
            self.end(error)

    def end(self, error: Exception | None = None) -> None:
        self._stream.end(error)

    def close(self) -> None:
        self._health.discard(self)

    def _send(self) -> None:
        assert self._service is not None
        if (status := self._health.status(self._service)) != self._sent:
            self._stream.send(status)
            self._sent = status
