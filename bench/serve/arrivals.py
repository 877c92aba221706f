"""`python -m bench.serve.arrivals`: requests that come at a fixed rate whether or not earlier ones are answered."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import uvloop

from bench.serve.load import percentile

_MOST_CONNECTIONS = 4096
_LAST_SECONDS = 30.0  # for the last answers


@dataclass
class Tally:
    """Times are from the moment a request was due: one that waits for a connection waits for its answer too."""

    statuses: Counter[int] = field(default_factory=Counter)
    took: list[float] = field(default_factory=list)  # of those that were answered with a prediction
    refused_took: list[float] = field(default_factory=list)
    failed: int = 0  # no answer at all

    def summary(self) -> dict[str, Any]:
        took, refused = sorted(self.took), sorted(self.refused_took)
        return {
            "statuses": {str(status): count for status, count in self.statuses.items()},
            "failed": self.failed,
            "p50_ms": percentile(took, 0.5) * 1e3,
            "p99_ms": percentile(took, 0.99) * 1e3,
            "refused_p99_ms": percentile(refused, 0.99) * 1e3 if refused else 0.0,
        }


class Client(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self.transport: asyncio.Transport
        self._due: float | None = None
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def ask(self, due: float) -> None:
        self._due = due
        self.transport.write(self._clients.request)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, end, body = self._buffer.partition(b"\r\n\r\n")
        if not end or len(body) < content_length(head):
            return
        self._buffer = b""
        due, self._due = self._due, None
        assert due is not None
        self._clients.answered(due, int(head[9:12]))
        if b"connection: close" in head.lower():
            self.transport.close()
        else:
            self._clients.free(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if self._due is not None:
            self._clients.lost()
        self._clients.gone(self)


class Clients:
    def __init__(self, host: str, port: int, request: bytes) -> None:
        self._place, self.request = (host, port), request
        self.tally = Tally()
        self._free: deque[Client] = deque()
        self._due: deque[float] = deque()
        self._open = 0
        self._connected: set[Client] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self.pending = 0

    def arrive(self, due: float) -> None:
        self.pending += 1
        if self._free:
            self._free.pop().ask(due)
            return
        self._due.append(due)
        if self._open < _MOST_CONNECTIONS:
            self._open += 1
            task = self._loop.create_task(self._connect())
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    def free(self, client: Client) -> None:
        if self._due:
            client.ask(self._due.popleft())
        else:
            self._free.append(client)

    def answered(self, due: float, status: int) -> None:
        self.pending -= 1
        self.tally.statuses[status] += 1
        (self.tally.took if status == 200 else self.tally.refused_took).append(self._loop.time() - due)

    def lost(self) -> None:
        self.pending -= 1
        self.tally.failed += 1

    def gone(self, client: Client) -> None:
        self._open -= 1
        self._connected.discard(client)
        if client in self._free:
            self._free.remove(client)

    async def close(self) -> None:
        for client in self._connected:
            client.transport.close()
        while self._connected or self._opening:
            await asyncio.sleep(0.001)

    async def _connect(self) -> None:
        try:
            _, client = await self._loop.create_connection(lambda: Client(self), *self._place)
        except OSError:
            self._open -= 1
            if self._due:
                self._due.popleft()
                self.lost()
            return
        self._connected.add(client)
        self.free(client)


def content_length(head: bytes) -> int:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


async def arrive(url: str, body: bytes, headers: Mapping[str, str], rate: float, seconds: float) -> dict[str, Any]:
    place = urlsplit(url)
    lines = [f"POST {place.path} HTTP/1.1", f"host: {place.netloc}", f"content-length: {len(body)}"]
    head = "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode()
    clients = Clients(place.hostname or "", place.port or 80, head + body)
    loop = asyncio.get_running_loop()
    began, count = loop.time(), int(rate * seconds)
    sent = 0
    while sent < count:
        due = int((loop.time() - began) * rate) + 1
        while sent < min(due, count):
            clients.arrive(began + sent / rate)
            sent += 1
        await asyncio.sleep(max(0.0, began + sent / rate - loop.time()))
    end = loop.time() + _LAST_SECONDS
    while clients.pending and loop.time() < end:
        await asyncio.sleep(0.01)
    clients.tally.failed += clients.pending
    summary = clients.tally.summary()
    await clients.close()
    return {"sent": count, **summary}


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    told["body"] = Path(told["body"]).read_bytes()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(arrive(**told))))
