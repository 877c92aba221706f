"""Load shedding: whether a prediction may wait for its model, decided once, before its body is read.

Requests that find the queue full or cannot meet their deadline at the current throughput get 503 immediately, which
costs a fraction of reading and computing them. HTTP decides by the head of a request. gRPC names the model in the
message, so there the decision comes as soon as the message is parsed. An admitted request is computed unless its
deadline passes, or would pass during the run, or its client leaves. A canary has its own queue, so a request that is
routed to it is checked against that one too; texts are admitted in llm/engine.py.

A request whose body is still arriving holds no place in the queue, since slow clients must not keep others out. Where
many bodies arrive at the same moment the queue may thus grow past its limit, by at most the number of connections.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable

from pipeline.system.wording import seconds
from serve.errors import Busy, DeadlineExceeded
from serve.model_version import ModelVersion
from serve.request_context import TIMEOUT_HEADER, RequestContext, parse_timeout_header
from serve.runtime.batcher import Batcher

_SAFETY_FACTOR = 1.6  # on the estimate: other processes may take the machine, and an admitted request must not be late


def admit(request: RequestContext, version: ModelVersion) -> None:
    """Set the deadline of a prediction, or raise Busy or DeadlineExceeded."""
    set_deadline(request, version)
    check_capacity(version.batcher, request.deadline, version.unstarted + version.decoding)


def set_deadline(request: RequestContext, version: ModelVersion) -> None:
    """Use the time that the client gives in a header, or the bundle's default."""
    if (given := request.headers.get(TIMEOUT_HEADER)) is not None:
        request.timeout_seconds = min(request.timeout_seconds, parse_timeout_header(given))
    timeout = request.timeout_seconds
    request.deadline = request.received_at + (timeout if timeout < math.inf else version.default_timeout_seconds)


def check_capacity(batcher: Batcher, deadline: float, arriving: int = 0) -> None:
    """Raise Busy or DeadlineExceeded if the queue is full or too slow; `arriving` requests are not in it yet."""
    now = time.monotonic()
    if now >= deadline:
        raise DeadlineExceeded("the deadline passed before the request was queued; it was not computed")
    limit, waiting = batcher.options.max_waiting, batcher.waiting + arriving
    if waiting >= limit:
        batcher.remove_obsolete_if_due(now)
        if (waiting := batcher.waiting + arriving) >= limit:
            wait = batcher.expected_seconds(now, arriving)
            raise Busy(f"{waiting} requests wait already; try again in a moment", wait)
    if waiting and deadline < math.inf:  # with an empty queue the estimate does not count, so that it is renewed
        wait = batcher.expected_seconds(now, arriving)
        if now + wait * _SAFETY_FACTOR > deadline:
            raise Busy(f"the requests before it take about {seconds(wait)}, longer than its deadline", wait)


_PAUSE_SECONDS = 0.05
_PAUSES_ENDED = 64  # in that time: so many refusals take a twentieth of it


class Pauses:
    """Pauses of the clients that were refused for lack of capacity.

    Many that ask again at once would take all the time with their refusals. What a paused client sends stays in the
    kernel's buffers and costs nothing. Each has its turn, so that refusals take a twentieth of the time.
    """

    def __init__(self) -> None:
        self._ends: deque[Callable[[], None]] = deque()
        self._is_due = False

    def add(self, end: Callable[[], None]) -> None:
        """Note what ends the pause of a client, which has begun."""
        self._ends.append(end)
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(_PAUSE_SECONDS, self._end_some)

    def end_all(self) -> None:
        while self._ends:
            self._ends.popleft()()

    def _end_some(self) -> None:
        for _ in range(min(_PAUSES_ENDED, len(self._ends))):
            self._ends.popleft()()
        self._is_due = bool(self._ends)
        if self._is_due:
            asyncio.get_running_loop().call_later(_PAUSE_SECONDS, self._end_some)
