"""Floods: the work for them is bounded by their bytes and by turn, and ends with ENHANCE_YOUR_CALM."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace
from typing import Any, cast

import hpack
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from serve.monitoring.logs import ConnectionLog
from serve.wire.connection_limits import FLOOD_BUDGET, MAX_STREAMS, CallMemory
from serve.wire.http2 import frames
from serve.wire.http2.connection import Connection, Host
from serve.wire.http2.frames import END_HEADERS, END_STREAM, PADDED, ConnectionFault, ErrorCode, frame
from tests.quick import quick
from tests.serve.wire.http2.frames import (
    CLIENT_PREFACE,
    GRPC,
    EchoApplication,
    EchoConnection,
    bodies,
    data,
    encode_block,
    headers,
    open_connection,
    request,
    resets,
    split_frames,
)
from tests.serve.wire.transport import FakeTransport

LINES_PER_BYTE = 40  # a PING of 17 bytes takes about 30 lines, a field of one byte 30
LINES_OF_BUDGET = 150_000  # the work that a connection may cause before the flood guard ends it


class LineCounter:
    """Counts the lines that the modules of connections execute: work, independent of the machine's speed."""

    def __init__(self) -> None:
        self.lines = 0

    def __enter__(self) -> LineCounter:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, code: FrameType, event: str, _argument: Any) -> Any:
        if "serve/wire" not in code.f_code.co_filename or "tests" in code.f_code.co_filename:
            return None
        if event == "line":
            self.lines += 1
        return self._trace


def tiny_field_block() -> bytes:
    """Return a block of many fields of one byte each, just below the limit of a list."""
    return encode_block(GRPC) + b"\x82" * 0 + b"\x90" * 600


class Flood:
    """Bytes that prepare a connection, and bytes that are then repeated.

    A flood that costs its client as much as the server may go on: only its memory and turns are limited.
    """

    def __init__(self, repeated: Callable[[int], bytes] | bytes, *setup: bytes, may_go_on: bool = False) -> None:
        self.setup, self.may_go_on = b"".join(setup), may_go_on
        self._repeated = repeated

    def sent(self) -> Iterator[bytes]:
        for number in itertools.count(20_001, 2):
            yield self._repeated if isinstance(self._repeated, bytes) else self._repeated(number)


NO_WINDOW = frames.settings({frames.INITIAL_WINDOW_SIZE: 0})
WAITING_ANSWERS = NO_WINDOW + b"".join(request(number, b"x" * 400) for number in range(1, 2001, 2))
BEGUN_CALLS = b"".join(headers(number) for number in range(1, 2001, 2))
MANY_SETTINGS = frame(frames.SETTINGS, 0, 0, b"".join(frames.settings({4: 65535 + n % 2})[9:] for n in range(32)))
FLOODS = {
    "ping": Flood(frame(frames.PING, 0, 0, b"12345678")),
    "ping acknowledgement": Flood(frame(frames.PING, frames.ACK, 0, b"12345678")),
    "settings": Flood(frames.settings({})),
    "settings acknowledgement": Flood(frame(frames.SETTINGS, frames.ACK, 0)),
    "settings with many entries": Flood(MANY_SETTINGS),
    "settings with many begun calls": Flood(MANY_SETTINGS, BEGUN_CALLS),
    "settings with many waiting answers": Flood(frames.settings({4: 0}) + frames.settings({4: 1}), WAITING_ANSWERS),
    "settings growing by one byte": Flood(lambda n: frames.settings({4: n // 2 - 10_000}), WAITING_ANSWERS),
    "settings back and forth with one byte of the connection": Flood(
        frames.settings({4: 9}) + frames.settings({4: 0}) + frames.window_update(0, 1), WAITING_ANSWERS
    ),
    "too wide stream, closed, then settings": Flood(
        lambda n: (
            headers(n)
            + frames.window_update(n, frames.MAX_WINDOW - 65535)
            + frames.rst_stream(n, ErrorCode.CANCEL)
            + frames.settings({4: 65536})
        ),
        BEGUN_CALLS,
    ),
    "connection window with many waiting answers": Flood(frames.window_update(0, 1), WAITING_ANSWERS),
    "stream window with many waiting answers": Flood(frames.window_update(1, 1), WAITING_ANSWERS),
    "stream window while the connection's is empty": Flood(
        frames.window_update(3, 1), NO_WINDOW, request(1, b"x" * 16_000), request(3, b"x" * 16_000)
    ),
    "window of closed streams": Flood(frames.window_update(1, 1), request(1)),
    "rapid reset": Flood(lambda n: request(n, path=b"/waits") + frames.rst_stream(n, ErrorCode.CANCEL)),
    "reset of begun calls": Flood(lambda n: headers(n) + frames.rst_stream(n, ErrorCode.CANCEL)),
    "reset of closed streams": Flood(frames.rst_stream(1, ErrorCode.CANCEL), request(1)),
    "resets that the server is made to send": Flood(lambda n: headers(n) + frames.window_update(n, 0)),
    "malformed heads": Flood(lambda n: headers(n, GRPC[1:])),
    "different content-lengths": Flood(
        lambda n: headers(n, [*GRPC, (b"content-length", b"1"), (b"content-length", b"2")])
    ),
    "empty continuations": Flood(frame(frames.CONTINUATION, 0, 1), headers(1, flags=0)),
    "tiny continuations": Flood(
        lambda n: (
            headers(n, flags=0)
            + frame(frames.CONTINUATION, 0, n) * 50
            + frame(frames.CONTINUATION, END_HEADERS, n)
            + data(n, b"")
        )
    ),
    "large continuations": Flood(frame(frames.CONTINUATION, 0, 1, b"x" * 16_384), headers(1, flags=0)),
    "empty data": Flood(data(1, b"", 0), headers(1)),
    "tiny data": Flood(data(1, b"x", 0), headers(1)),
    "padding": Flood(frame(frames.DATA, PADDED, 1, b"\xc8" + b"\0" * 200), headers(1)),
    "data of answered calls": Flood(data(1, b"x", 0), request(1)),
    "data of reset calls": Flood(data(1, b"x", 0), headers(1), frames.rst_stream(1, ErrorCode.CANCEL)),
    "priority": Flood(frame(frames.PRIORITY, 0, 1, b"\0" * 5)),
    "unknown frames": Flood(frame(0xFA, 0, 0)),
    "goaway": Flood(frames.goaway(0, ErrorCode.NO_ERROR)),
    "trailers of answered calls": Flood(
        headers(1, [(b"a", b"b")], END_HEADERS | END_STREAM), headers(1, [*GRPC[:2], (b":path", b"/refused")])
    ),
    "trailers": Flood(lambda n: headers(n) + headers(n, [(b"a", b"b")] * 50, END_HEADERS | END_STREAM), may_go_on=True),
    "costly heads": Flood(lambda n: frame(frames.HEADERS, END_HEADERS | END_STREAM, n, tiny_field_block())),
    "header bombs": Flood(
        lambda n: frame(
            frames.HEADERS,
            END_HEADERS | END_STREAM,
            n,
            encode_block(GRPC) + b"\x40\x01a\x7f\xa1\x1e" + b"x" * 4000 + b"\xbe" * 10_000,
        )
    ),
    "table size updates": Flood(
        lambda n: frame(frames.HEADERS, END_HEADERS | END_STREAM, n, b"\x20\x3f\xe1\x1f" * 1000 + encode_block(GRPC))
    ),
    "huffman strings": Flood(
        lambda n: headers(n, [*GRPC, *((b"x-%d" % one, b"\xff" * 300) for one in range(12))]) + data(n, b""),
        may_go_on=True,
    ),
    "begun calls": Flood(lambda n: headers(n), may_go_on=True),
    "zero windows": Flood(lambda n: request(n, b"x" * 500), NO_WINDOW, may_go_on=True),
    "refused streams": Flood(lambda n: headers(n), BEGUN_CALLS, *[headers(n) for n in range(2001, 4201, 2)]),
}
SAMPLE = (
    "settings with many waiting answers",
    "rapid reset",
    "tiny continuations",
    "header bombs",
    "tiny data",
    "begun calls",
)


def take(transport: FakeTransport) -> list[frames.Frame]:
    """Return what was written since the last call."""
    written = bytes(transport.written)
    transport.written.clear()
    return split_frames(written)


def connect(app: EchoApplication, memory: CallMemory, lines: list[str]) -> tuple[Connection, FakeTransport]:
    host = Host(
        app,
        ConnectionLog(lines.append),
        memory,
        admit=lambda _: "",
        leave=lambda _: True,
        forget=lambda _: None,
        is_stopping=lambda: False,
    )
    connection, transport = Connection(host), FakeTransport()
    transport.connection = connection
    connection.connection_made(cast("Any", transport))
    return connection, transport


RECEIVED_AT_ONCE = 64 << 10
TURNS = 12
LINES_PER_TURN = 250_000


@pytest.mark.parametrize("name", quick(SAMPLE, FLOODS))
def test_honest_client_is_answered_within_two_turns_of_a_flood(name: str) -> None:
    """However much the flood has sent, one turn handles a limited part of it, then the honest client."""
    flood = FLOODS[name]

    async def run() -> None:
        app, memory = EchoApplication(), CallMemory()
        errors: list[str] = []
        honest, answers = connect(app, memory, [])
        honest.data_received(CLIENT_PREFACE + frames.window_update(0, 1 << 20))
        attacker, attacked = connect(app, memory, errors)
        attacker.data_received(CLIENT_PREFACE + flood.setup)
        sent = flood.sent()
        for number in range(1, 2 * TURNS, 2):
            take(answers)
            with LineCounter() as counter:
                if not attacked.reading_paused and not attacker._closing:
                    chunk = b"".join(itertools.islice(sent, 1 + RECEIVED_AT_ONCE // max(1, len(next(sent)))))
                    attacker.data_received(chunk)
                honest.data_received(request(number))
                await asyncio.sleep(0)
            assert bodies(take(answers)) == {number: b"hello"}
            assert counter.lines < LINES_PER_TURN, errors
        attacker.connection_lost(None)
        while attacker._streams.close():
            await asyncio.sleep(0)
        for waiting in app.waiting:
            app.answer(*waiting)
        assert memory.held_bytes == 0

    asyncio.run(run())


@pytest.mark.parametrize("name", quick(SAMPLE, FLOODS))
def test_work_of_a_flood_is_bounded_by_its_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    time = SimpleNamespace(monotonic=lambda: 0.0)  # however slow the machine is
    monkeypatch.setattr("serve.wire.connection_limits.time", time)
    client, flood = open_connection(), FLOODS[name]
    for part in split_frames(flood.setup):
        client.send(frame(*part))
    received, code = 0, None
    with LineCounter() as counter:
        try:
            for sent in itertools.islice(flood.sent(), 4000):
                received += len(sent)
                client.send(sent)
                if received > (200_000 if flood.may_go_on else 500_000):
                    break
        except ConnectionFault as fault:
            code = fault.code
    assert code is (None if flood.may_go_on else ErrorCode.ENHANCE_YOUR_CALM)
    assert len(client.streams.open) <= MAX_STREAMS
    assert counter.lines < LINES_OF_BUDGET + LINES_PER_BYTE * received


@pytest.mark.parametrize("size", [1, 2, 7])
def test_tiny_pieces_of_a_frame_are_joined_once(size: int) -> None:
    """The buffer is a bytearray that grows in place: no byte is copied again for each piece."""
    client = open_connection()
    sent = headers(1) + data(1, b"x" * 16_384)
    with LineCounter() as counter:
        for place in range(0, len(sent), size):
            client.streams.receive(sent[place : place + size])
    assert bodies(client.received()) == {1: b"x" * 16_384}
    assert counter.lines < 30 * len(sent)


class Http2Machine(RuleBasedStateMachine):
    """A client that sends valid and invalid frames in any order; work must stay below what its bytes may cause."""

    def __init__(self) -> None:
        super().__init__()
        self.received = 0
        self.counter = LineCounter()
        self._connect()

    def _connect(self) -> None:
        self.client, self.next_id, self.encoder = open_connection(), 1, hpack.Encoder()
        self.received = self.counter.lines = 0

    def _send(self, sent: bytes) -> None:
        self.received += len(sent)
        try:
            with self.counter:
                self.client.send(sent)
        except ConnectionFault:
            self._check()
            self.client.streams.close()
            for waiting in self.client.app.waiting:
                self.client.app.answer(*waiting)
            self._check_released()
            self._connect()
        self._check()

    def _check(self) -> None:
        assert self.counter.lines < LINES_OF_BUDGET + LINES_PER_BYTE * self.received

    def _check_released(self) -> None:
        while self.client.streams.close():
            pass
        assert self.client.streams.open == {}
        assert self.client.streams._memory.held_bytes == self.client.streams.send_queue.queued_bytes == 0

    @rule(
        count=st.sampled_from([1, 1, 3, 150]),
        path=st.sampled_from([b"/echo", b"/waits", b"/refused"]),
        size=st.sampled_from([0, 1, 300, 16_384]),
        ends=st.booleans(),
        length=st.sampled_from([None, b"1", b"x"]),
        squeezed=st.booleans(),
    )
    def open_calls(self, count: int, path: bytes, size: int, ends: bool, length: bytes | None, squeezed: bool) -> None:
        fields = [*GRPC[:2], (b":path", path), *([] if length is None else [(b"content-length", length)])]
        for _ in range(count):
            block = bytes(self.encoder.encode(fields, huffman=squeezed))
            sent = frame(frames.HEADERS, END_HEADERS, self.next_id, block) + data(
                self.next_id, b"x" * size, END_STREAM if ends else 0
            )
            client = self.client
            self.next_id += 2
            self._send(sent)
            if client is not self.client:
                return

    @rule(size=st.sampled_from([0, 64, 4096]))
    def resize_table(self, size: int) -> None:
        self.encoder.header_table_size = size

    @rule(stream=st.integers(0, 400), size=st.sampled_from([0, 1, 1, 500, 1 << 20, frames.MAX_WINDOW]))
    def widen(self, stream: int, size: int) -> None:
        self._send(frames.window_update(stream and 2 * stream - 1, size))

    @rule(sizes=st.lists(st.sampled_from([0, 1, 2, 65535, 1 << 20, frames.MAX_WINDOW]), max_size=40))
    def change_settings(self, sizes: list[int]) -> None:
        payload = b"".join(frames.settings({frames.INITIAL_WINDOW_SIZE: size})[9:] for size in sizes)
        self._send(frame(frames.SETTINGS, 0, 0, payload))

    @rule(
        kind=st.integers(0, 11),
        flags=st.sampled_from([0, 1, 4, 5, 8]),
        stream=st.integers(0, 9),
        payload=st.sampled_from([b"", b"\0" * 4, b"\0" * 5, b"12345678", b"x" * 300]),
        count=st.sampled_from([1, 1, 500]),
    )
    def send_any_frame(self, kind: int, flags: int, stream: int, payload: bytes, count: int) -> None:
        self._send(frame(kind, flags, stream, payload) * count)

    @rule(stream=st.integers(1, 400))
    def reset(self, stream: int) -> None:
        self._send(frames.rst_stream(2 * stream - 1, ErrorCode.CANCEL))

    @rule()
    def answer_all(self) -> None:
        with self.counter:
            for waiting in self.client.app.waiting:
                self.client.app.answer(*waiting)
        self.client.app.waiting.clear()
        self.client.received()
        self._check()

    @rule()
    def check_timeouts(self) -> None:
        with LineCounter() as counter:
            self.client.streams.check_timeouts(0)
        assert counter.lines < 30, "a check does not walk calls that are not due"

    def teardown(self) -> None:
        self.client.streams.close()
        for waiting in self.client.app.waiting:
            self.client.app.answer(*waiting)
        self._check_released()


def test_work_is_bounded_by_the_received_bytes() -> None:
    chosen = settings(
        max_examples=25,
        stateful_step_count=20,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Http2Machine, settings=chosen)


def test_work_of_a_window_update_does_not_grow_with_waiting_answers() -> None:
    lines = []
    for count in (10, 1000):
        client: EchoConnection = open_connection()
        client.send(NO_WINDOW, *(request(number, b"x" * 50) for number in range(1, 2 * count, 2)))
        with LineCounter() as counter:
            client.send(frames.window_update(0, 1), frames.settings({4: 0}), frames.window_update(1, 1))
        lines.append(counter.lines)
    assert lines[1] - lines[0] < 20


def test_answered_requests_earn_budget_for_control_frames() -> None:
    client = open_connection()
    for number in range(1, 4 * FLOOD_BUDGET, 2):
        client.send(request(number), frames.window_update(0, 1), frame(frames.PING, 0, 0, b"12345678"))
    assert bodies(client.send(request(99_999))) == {99_999: b"hello"}


def test_streams_above_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.wire.connection_limits.MAX_STREAMS", 2)
    client = open_connection()
    found = client.send(*(request(number, path=b"/waits") for number in (1, 3, 5)))
    assert resets(found) == {5: ErrorCode.REFUSED_STREAM}
    client.app.answer(*client.app.waiting[0])
    assert resets(client.send(request(7))) == {}
