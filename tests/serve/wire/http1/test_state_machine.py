"""Any sequence of valid and invalid requests, cut anywhere: each complete valid request gets one answer, in order.

The cost oracle counts calls of functions, which do not depend on the speed of the machine: they stay within a bound for
each byte that was received.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from serve.wire.http1 import Request
from serve.wire.request import Disconnected
from tests.serve.wire.http1.fakes import connect
from tests.serve.wire.http1.test_floods import counted_calls
from tests.serve.wire.http1.test_strictness import REFUSED
from tests.serve.wire.transport import FakeTransport

FEW, MANY = 60, 1000
CALLS_PER_BYTE, CALLS_PER_PIECE, CALLS_AT_ALL = 12, 150, 1000
INVALID = {sent: status for status, sent in REFUSED.values() if len(sent) < 2000}
HEADERS = {
    "plain": b"",
    "upgrade": b"connection: upgrade\r\nupgrade: x\r\n",
    "expects": b"expect: 100-continue\r\n",
    "many": b"a: b\r\n" * 100,
}
ENDINGS = {"close": b"connection: close\r\n", "close, upgrade": b"connection: close, upgrade\r\nupgrade: x\r\n"}
Answer = tuple[int, bytes]


class Application:
    """Answers with the path and a checksum of the body: at once, in a task, or after some turns."""

    request_class = Request

    def begin(self, request: Request) -> Any:
        if request.path.startswith("/refused"):
            request.respond_now(503, (), request.path.encode())
            return None
        return self._answer(request)

    async def _answer(self, request: Request) -> None:
        body, more = b"", True
        if request.path.startswith("/slow"):
            for _ in range(20):
                await asyncio.sleep(0)
        try:
            while more and not request.path.startswith("/early"):
                piece, more = await request.receive()
                body += piece
        except Disconnected:
            return
        await request.respond(200, (), b"%b %d" % (request.path.encode(), zlib.crc32(body)))


class Errors(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info or record.levelno >= logging.ERROR:
            self.records.append(record)


def parse_answers(written: bytes) -> list[Answer]:
    """Return the final responses; each has a content-length."""
    answers = []
    while written:
        head, separator, rest = written.partition(b"\r\n\r\n")
        assert separator, written
        status = int(head.split(b" ")[1])
        if status == 100:
            written = rest
            continue
        (length,) = [int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")]
        assert len(rest) >= length
        answers.append((status, rest[:length] if status in (200, 503) else b""))
        written = rest[length:]
    return answers


class Http1(RuleBasedStateMachine):
    """A client that sends what the rules append, in pieces of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.errors = Errors()
        self.failures: list[dict[str, Any]] = []  # of callbacks
        logging.getLogger("serve").addHandler(self.errors)
        self.loop.set_exception_handler(lambda _, context: self.failures.append(context))
        self.transport = FakeTransport()
        self.unsent = b""
        self.sent = self.appended = self.pieces = self.count = 0
        self.expected: list[tuple[int, Answer]] = []  # with the number of bytes that must have been sent before
        self.ended = self.half_closed = False
        self.calls, self.turns = [0], 0
        self.run()
        self.run()
        self.empty_turn_calls = self.calls[0] // 2
        self.run(lambda: connect(Application(), self.transport))

    def run(self, action: Any = None) -> None:
        """Run an action in the event loop, and let it make a turn."""

        async def turn() -> None:
            if action is not None:
                action()
            await asyncio.sleep(0)

        self.turns += 1
        with counted_calls(self.calls):
            self.loop.run_until_complete(turn())

    def append(self, data: bytes, answer: Answer) -> None:
        self.unsent += data
        self.appended += len(data)
        self.expected.append((self.appended, answer))

    @precondition(lambda self: not self.ended)
    @rule(
        path=st.sampled_from(["a", "refused", "slow", "early"]),
        headers=st.sampled_from([*HEADERS]),
        framing=st.sampled_from(["none", "length", "chunked"]),
        body=st.sampled_from([b"", b"x", b"\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"y" * 300, b"z" * 30_000]),
        chunk=st.sampled_from([1, 7, 1000, 40_000]),
    )
    def request(self, path: str, headers: str, framing: str, body: bytes, chunk: int) -> None:
        self._request(path, HEADERS[headers], framing, body, chunk)

    @precondition(lambda self: not self.ended)
    @rule(kind=st.sampled_from([*ENDINGS]), framing=st.sampled_from(["none", "length", "chunked"]))
    def last_request(self, kind: str, framing: str) -> None:
        self._request("a", ENDINGS[kind], framing, b"abc", 2)
        self.ended = True

    def _request(self, path: str, headers: bytes, framing: str, body: bytes, chunk: int) -> None:
        self.count += 1
        target = f"/{path}{self.count}".encode()
        head = b"POST %b HTTP/1.1\r\nhost: x\r\n%b" % (target, headers)
        if framing == "none":
            body = b""
            data = head + b"\r\n"
        elif framing == "length":
            data = head + b"content-length: %d\r\n\r\n%b" % (len(body), body)
        else:
            parts = [body[place : place + chunk] for place in range(0, len(body[: 100 * chunk]), chunk)]
            body = b"".join(parts)
            chunks = b"".join(b"%x;a=b\r\n%b\r\n" % (len(part), part) for part in parts)
            data = head + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\nx-trailer: y\r\n\r\n"
        if path == "refused":
            self.append(data, (503, target))
        else:
            self.append(data, (200, b"%b %d" % (target, zlib.crc32(b"" if path == "early" else body))))

    @precondition(lambda self: not self.ended)
    @rule(data=st.sampled_from([*INVALID]))
    def invalid_request(self, data: bytes) -> None:
        self.append(data, (INVALID[data], b""))
        self.ended = True

    @precondition(lambda self: self.ended)
    @rule(data=st.sampled_from([b"GET /never HTTP/1.1\r\nhost: x\r\n\r\n", b"\r\n", b"\0" * 100]))
    def bytes_behind_the_end(self, data: bytes) -> None:
        self.unsent += data

    @precondition(lambda self: self.unsent)
    @rule(size=st.sampled_from([1, 2, 3, 10, 60, 500, 4096, 9000, 256_000]), times=st.integers(1, 60))
    def send(self, size: int, times: int) -> None:
        for _ in range(times):
            if self.half_closed or not self.unsent:
                return
            if self.transport.reading_paused or self.transport.closing:
                self.run()
                continue
            piece, self.unsent = self.unsent[:size], self.unsent[size:]
            self.sent += len(piece)
            self.pieces += 1
            connection = self.transport.connection
            self.run(lambda piece=piece, connection=connection: connection.data_received(piece))

    @rule()
    def turn(self) -> None:
        self.run()

    @precondition(
        lambda self: not self.half_closed and not self.transport.reading_paused and not self.transport.closing
    )
    @rule()
    def half_close(self) -> None:
        self.half_closed = self.ended = True
        self.run(self._end_of_file)

    def _end_of_file(self) -> None:
        if not self.transport.connection.eof_received():
            self.transport.close()

    def teardown(self) -> None:
        try:
            while self.unsent and not self.half_closed and not self.transport.lost:
                self.send(256_000, 10)
            for _ in range(30 * (len(self.expected) + 3)):
                self.run()
            self._check()
        finally:
            self.run(self.transport.close)
            self.run()
            self.loop.close()
            logging.getLogger("serve").removeHandler(self.errors)

    def _check(self) -> None:
        answers = parse_answers(bytes(self.transport.written))
        expected = [answer for end, answer in self.expected if end <= self.sent]
        incomplete = [answer for end, answer in self.expected if end > self.sent][:1]
        if self.half_closed and len(answers) == len(expected) + 1:
            last = answers.pop()
            assert last[0] == 400 or [last] == incomplete, "the rest of a request never came, or was not needed"
        elif len(answers) > len(expected) and (not expected or expected[-1][0] in (200, 503)):
            # An invalid request may be refused before all of it was sent.
            expected += [answer for answer in incomplete if answer[0] not in (200, 503)]
        assert answers == expected
        assert not self.failures
        assert not self.errors.records
        allowed = CALLS_PER_BYTE * self.sent + CALLS_PER_PIECE * (self.pieces + self.count) + CALLS_AT_ALL
        calls = self.calls[0] - self.turns * self.empty_turn_calls
        assert calls <= allowed, "each byte costs a bounded number of calls"


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.long)])
def test_every_valid_request_is_answered_once_and_in_order(count: int) -> None:
    run_state_machine_as_test(
        Http1,
        settings=settings(
            max_examples=count,
            stateful_step_count=20,
            deadline=None,
            database=None,
            derandomize=count == FEW,
            suppress_health_check=list(HealthCheck),
        ),
    )
