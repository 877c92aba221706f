"""`python -m benchmarks.serve.arrivals`: requests that come at a fixed rate whether or not earlier ones are answered.

A request counts from when it was due, whatever kept it: one that waits for a free connection waits for its answer too.
With a deadline a client gives up: what was not sent or answered by then has failed.
The connections are opened before the clock starts and are kept open; one that the service closes is opened anew.
Not measured: more requests in flight than there are connections (the delay this causes is reported), and
whether an answer is right, beyond its status and length.

It takes some 15 µs of CPU time a request, as h2load does, and 60 at low rates. (h2load can be limited to a rate too,
but does not know when a request was due, and sends no more over a connection that was closed.) Both sides share the
machine: the CPU time of each is reported.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import resource
import sys
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import uvloop

from benchmarks.serve.load import percentile

_WAIT_SECONDS = 3.0  # the longest answers for which there are connections enough
_MOST_CONNECTIONS = 4096
_LAST = b"\r\nconnection: close\r\n"
_OPENING = 32  # connections at once: a service is to be overrun by requests, not by these
_TICK_SECONDS = 0.001  # the loop's timers know no shorter one: it would go round without a pause
_LAST_SECONDS = 30.0  # for the last answers


@dataclass(frozen=True)
class Arrived:
    """Times are from the moment a request was due."""

    due: int
    seconds: float  # until the last was answered; not less than they were to come in
    statuses: Mapping[int, int]  # of those that were answered
    p50_ms: float  # of predictions
    p99_ms: float
    refused_p99_ms: float  # of all other answers; 0 where there is none
    late_p99_ms: float  # how long after they were due requests were sent
    cpu_seconds: float  # of the client

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Arrived:
        """Parse the printed result."""
        return cls(**{**fields, "statuses": {int(status): count for status, count in fields["statuses"].items()}})

    @property
    def predictions(self) -> int:
        return self.statuses.get(200, 0)

    @property
    def refused(self) -> int:
        return self.statuses.get(503, 0)

    @property
    def failed(self) -> int:
        """Count requests with neither a prediction nor a rejection."""
        return self.due - self.predictions - self.refused


class Client(asyncio.Protocol):
    """One connection, one request at a time."""

    __slots__ = ("_clients", "_rest", "due", "sent", "transport")

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self.transport: asyncio.Transport
        self.due = -1.0  # of the request it waits for; below 0 it waits for none
        self.sent = 0.0
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._clients.free(self)

    def data_received(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
        if not complete(data):
            self._rest = data
            return
        self._rest = b""
        self._clients.answered(self, int(data[9:12]), last=_LAST in data.partition(b"\r\n\r\n")[0].lower() + b"\r\n")

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._clients.gone(self)


class Clients:
    def __init__(self, host: str, port: int, request: bytes, deadline_seconds: float = math.inf) -> None:
        self._place, self._request, self._deadline_seconds = (host, port), request, deadline_seconds
        self._loop = asyncio.get_running_loop()
        self.answers: list[tuple[int, float, float, float]] = []  # status, due, sent, answered
        self._free: list[Client] = []  # last freed, first used
        self._due: deque[float] = deque()
        self._all: set[Client] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._closing = False

    @property
    def waiting(self) -> int:
        """Count requests that are due and have no response yet, without those that were lost."""
        return len(self._due) + sum(client.due >= 0 for client in self._all)

    async def open(self, count: int) -> None:
        while len(self._all) < count:
            await asyncio.gather(*(self._connect() for _ in range(min(_OPENING, count - len(self._all)))))

    def arrive(self, due: float) -> None:
        if self._free and not self._due:
            self._ask(self._free.pop(), due)
        else:
            self._due.append(due)

    def answered(self, client: Client, status: int, *, last: bool) -> None:
        """`last`: the service closes the connection; a request sent on it would be lost."""
        now = self._loop.time()
        if now - client.due <= self._deadline_seconds:
            self.answers.append((status, client.due, client.sent, now))
        client.due = -1.0
        if last:
            client.transport.close()
        else:
            self.free(client)

    def free(self, client: Client) -> None:
        self._all.add(client)
        while self._due and self._loop.time() - self._due[0] > self._deadline_seconds:
            self._due.popleft()
        if self._due:  # with a deadline the last first, as for clients of their own
            self._ask(client, self._due.popleft() if self._deadline_seconds == math.inf else self._due.pop())
        else:
            self._free.append(client)

    def gone(self, client: Client) -> None:
        """Replace a connection that the service closed; its request is lost."""
        self._all.discard(client)
        if client in self._free:
            self._free.remove(client)
        if not self._closing:
            task = self._loop.create_task(self._connect())
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def close(self) -> None:
        self._closing = True
        await asyncio.gather(*self._opening, return_exceptions=True)
        for client in self._all:
            client.transport.close()
        while self._all:
            await asyncio.sleep(0.001)

    def _ask(self, client: Client, due: float) -> None:
        client.due, client.sent = due, self._loop.time()
        if self._deadline_seconds == math.inf:
            client.transport.write(self._request)
        else:
            left = self._deadline_seconds - client.sent + due
            client.transport.write(self._request.replace(b"\r\n", b"\r\nx-request-timeout: %.3f\r\n" % left, 1))

    async def _connect(self) -> None:
        await self._loop.create_connection(lambda: Client(self), *self._place)


def complete(data: bytes) -> bool:
    """Whether all of an answer is there."""
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return False
    start = data.find(b"content-length: ", 0, end)
    if start < 0:  # another case, or none
        start = data.lower().find(b"content-length: ", 0, end)
    size = int(data[start + 16 : data.find(b"\r", start)]) if start >= 0 else 0
    return len(data) >= end + 4 + size


async def arrive(
    url: str, body: bytes, headers: Mapping[str, str], rate: float, seconds: float, deadline_seconds: float = math.inf
) -> dict[str, Any]:
    """Send requests at a fixed rate; return the fields of `Arrived`."""
    target = urlsplit(url)
    lines = [f"POST {target.path} HTTP/1.1", f"host: {target.netloc}", f"content-length: {len(body)}"]
    head = "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode()
    clients, loop = (
        Clients(target.hostname or "", target.port or 80, head + body, deadline_seconds),
        asyncio.get_running_loop(),
    )
    count = max(1, round(rate * seconds))
    await clients.open(connections(rate, seconds))
    gc.freeze()
    gc.disable()  # what is kept of each answer would be looked through again and again
    cpu_seconds, started, sent_count = _cpu_seconds(), loop.time(), 0
    while sent_count < count:
        due = min(count, int((loop.time() - started) * rate) + 1)
        for number in range(sent_count, due):
            clients.arrive(started + number / rate)
        sent_count = due
        await asyncio.sleep(max(_TICK_SECONDS, started + sent_count / rate - loop.time()))
    end = loop.time() + _LAST_SECONDS
    while clients.waiting and loop.time() < end:
        await asyncio.sleep(0.01)
    cpu_seconds = _cpu_seconds() - cpu_seconds
    await clients.close()
    return {"due": count, "cpu_seconds": cpu_seconds, **summary(clients.answers, started, seconds)}


def connections(rate: float, seconds: float) -> int:
    """Return how many connections are needed so that one is free for every request, unless responses are slow."""
    return max(1, min(round(rate * min(_WAIT_SECONDS, seconds)), _MOST_CONNECTIONS))


def summary(answers: list[tuple[int, float, float, float]], began: float, seconds: float) -> dict[str, Any]:
    latencies = sorted((answered - due) * 1e3 for status, due, _, answered in answers if status == 200)
    refused_latencies = sorted((answered - due) * 1e3 for status, due, _, answered in answers if status != 200)
    delays = sorted((sent - due) * 1e3 for _, due, sent, _ in answers)
    return {
        "seconds": max(seconds, max((answered for *_, answered in answers), default=began) - began),
        "statuses": Counter(str(status) for status, *_ in answers),
        "p50_ms": percentile(latencies, 0.5),
        "p99_ms": percentile(latencies, 0.99),
        "refused_p99_ms": percentile(refused_latencies, 0.99) if refused_latencies else 0.0,
        "late_p99_ms": percentile(delays, 0.99),
    }


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    arguments["body"] = Path(arguments["body"]).read_bytes()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(arrive(**arguments))))
