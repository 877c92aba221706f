"""An HTTP/2 client in memory that sends and receives single frames."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import hpack
from hypothesis import settings

from serve.wire.http2 import frames
from serve.wire.http2.frames import (
    END_HEADERS,
    END_STREAM,
    FRAME_HEADER,
    PREFACE,
    ConnectionFault,
    ErrorCode,
    Frame,
    frame,
)
from serve.wire.http2.hpack import Field
from serve.wire.http2.stream import Stream
from serve.wire.http2.streams import Application, Streams

FUZZ_SETTINGS = settings(deadline=None, database=None, derandomize=True)
GRPC: list[Field] = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/echo"),
    (b":authority", b"x"),
    (b"te", b"trailers"),
]
CLIENT_PREFACE = PREFACE + frames.settings({})


def split_frames(data: bytes) -> list[Frame]:
    """Split bytes that consist of whole frames."""
    found = []
    while data:
        high, low, kind, flags, stream_id = FRAME_HEADER.unpack_from(data)
        end = 9 + (high << 8 | low)
        assert len(data) >= end
        found.append((kind, flags, stream_id, data[9:end]))
        data = data[end:]
    return found


def encode_block(fields: list[Field]) -> bytes:
    """Encode with the hpack package, without a table."""
    return b"".join(bytes(hpack.Encoder().encode([hpack.NeverIndexedHeaderTuple(*one)])) for one in fields)


def headers(stream_id: int, fields: list[Field] = GRPC, flags: int = END_HEADERS) -> bytes:
    return frame(frames.HEADERS, flags, stream_id, encode_block(fields))


def data(stream_id: int, payload: bytes, flags: int = END_STREAM) -> bytes:
    return frame(frames.DATA, flags, stream_id, payload)


def request(stream_id: int, payload: bytes = b"hello", path: bytes = b"/echo") -> bytes:
    return headers(stream_id, [(name, path if name == b":path" else value) for name, value in GRPC]) + data(
        stream_id, payload
    )


def decode_fields(payload: bytes) -> dict[bytes, bytes]:
    """Decode with the hpack package."""
    return dict(hpack.Decoder().decode(payload, raw=True))


class EchoApplication:
    """Answers with the request's body: at once, or for the path /waits when the test calls `answer`."""

    def __init__(self) -> None:
        self.parsed_heads = 0
        self.events: list[str] = []
        self.waiting: list[tuple[Streams, Stream]] = []

    def parse_head(self, request: dict[bytes, bytes] | None) -> Any:
        self.parsed_heads += 1
        return request

    def on_headers(self, streams: Streams, stream: Stream) -> None:
        self.events.append(f"headers {stream.id}")
        if stream.head is None:
            streams.answer(stream, b"", b"", b"\x08\x03431")
        elif stream.head[b":path"] == b"/refused":
            streams.answer(stream, b"", b"", b"\x8d")

    def on_data(self, _streams: Streams, stream: Stream, size: int) -> None:
        self.events.append(f"data {stream.id} {size}")

    def on_complete(self, streams: Streams, stream: Stream) -> None:
        self.events.append(f"complete {stream.id} {stream.size}")
        if stream.head[b":path"] == b"/waits":
            self.waiting.append((streams, stream))
        else:
            self.answer(streams, stream)

    def answer(self, streams: Streams, stream: Stream) -> None:
        streams.answer(stream, b"\x88", b"".join(stream.parts), b"\x00\x03end\x01.")

    def on_timeout(self, streams: Streams, stream: Stream) -> None:
        self.events.append(f"timeout {stream.id}")
        streams.answer(stream, b"", b"", b"\x08\x03408")

    def on_cancel(self, stream: Stream) -> None:
        self.events.append(f"cancel {stream.id}")


class MemoryConnection:
    """The server's side of one connection, without a socket."""

    def __init__(self, app: Application) -> None:
        self.errors: list[ErrorCode] = []
        self.drained: list[bool] = []
        self._out: list[bytes] = []
        self.streams = Streams(
            app, self._out.append, lambda code, _: self.errors.append(code), lambda: self.drained.append(True)
        )

    def send(self, *chunks: bytes) -> list[Frame]:
        data = b"".join(chunks)
        if not self.streams.reader.has_preface:
            assert self.streams.reader.read_preface(data)
            data = b""
        while self.streams.receive(data) and not self.streams.closed:
            data = b""
        return self.received()

    def send_until_fault(self, sent: Iterable[bytes]) -> ErrorCode:
        for one in sent:
            try:
                self.send(one)
            except ConnectionFault as fault:
                return fault.code
        raise AssertionError("no fault was raised")

    def received(self) -> list[Frame]:
        found = split_frames(b"".join(self._out))
        self._out.clear()
        return found


class EchoConnection(MemoryConnection):
    def __init__(self) -> None:
        self.app = EchoApplication()
        super().__init__(self.app)


def open_connection() -> EchoConnection:
    made = EchoConnection()
    assert made.send(CLIENT_PREFACE) == [(frames.SETTINGS, frames.ACK, 0, b"")]
    return made


def bodies(found: list[Frame]) -> dict[int, bytes]:
    return {number: payload for kind, _, number, payload in found if kind == frames.DATA}


def resets(found: list[Frame]) -> dict[int, ErrorCode]:
    return {
        number: ErrorCode(int.from_bytes(payload, "big"))
        for kind, _, number, payload in found
        if kind == frames.RST_STREAM
    }
