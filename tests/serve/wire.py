"""HTTP/2 as a client writes and reads it, frame by frame, right or wrong."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import hpack
from hypothesis import settings

from serve.grpc.http2 import frames
from serve.grpc.http2.frames import END_HEADERS, END_STREAM, HEAD, PREFACE, Code, ConnectionFault, Frame, frame
from serve.grpc.http2.hpack import Field
from serve.grpc.http2.stream import Application, Stream
from serve.grpc.http2.streams import Streams

RANDOM = settings(deadline=None, database=None, derandomize=True)
GRPC: list[Field] = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/echo"),
    (b":authority", b"x"),
    (b"te", b"trailers"),
]
HELLO = PREFACE + frames.settings({})


def cut(data: bytes) -> list[Frame]:
    """All of it is whole frames, of any length."""
    found = []
    while data:
        high, low, kind, flags, stream_id = HEAD.unpack_from(data)
        end = 9 + (high << 8 | low)
        assert len(data) >= end
        found.append((kind, flags, stream_id, data[9:end]))
        data = data[end:]
    return found


def block(fields: list[Field]) -> bytes:
    """By another implementation, without a table."""
    return b"".join(bytes(hpack.Encoder().encode([hpack.NeverIndexedHeaderTuple(*one)])) for one in fields)


def head(stream_id: int, fields: list[Field] = GRPC, flags: int = END_HEADERS) -> bytes:
    return frame(frames.HEADERS, flags, stream_id, block(fields))


def data(stream_id: int, payload: bytes, flags: int = END_STREAM) -> bytes:
    return frame(frames.DATA, flags, stream_id, payload)


def request(stream_id: int, payload: bytes = b"hello", path: bytes = b"/echo") -> bytes:
    return head(stream_id, [(name, path if name == b":path" else value) for name, value in GRPC]) + data(
        stream_id, payload
    )


def fields_of(payload: bytes) -> dict[bytes, bytes]:
    """What we said, read by another implementation."""
    return dict(hpack.Decoder().decode(payload, raw=True))


class Echo:
    """Answers with the body, or where the path is /waits when it is told to; remembers what it was told."""

    def __init__(self) -> None:
        self.learnt = 0
        self.told: list[str] = []
        self.waiting: list[tuple[Streams, Stream]] = []

    def understand(self, request: dict[bytes, bytes] | None) -> Any:
        self.learnt += 1
        return request

    def opened(self, streams: Streams, stream: Stream) -> None:
        self.told.append(f"opened {stream.id}")
        if stream.about is None:
            streams.answer(stream, b"", b"", b"\x08\x03431")
        elif stream.about[b":path"] == b"/refused":
            streams.answer(stream, b"", b"", b"\x8d")

    def grew(self, _streams: Streams, stream: Stream, size: int) -> None:
        self.told.append(f"grew {stream.id} {size}")

    def complete(self, streams: Streams, stream: Stream) -> None:
        self.told.append(f"complete {stream.id} {stream.size}")
        stream.running = True
        if stream.about[b":path"] == b"/waits":
            self.waiting.append((streams, stream))
        else:
            self.answer(streams, stream)

    def answer(self, streams: Streams, stream: Stream) -> None:
        streams.answer(stream, b"\x88", b"".join(stream.parts), b"\x00\x03end\x01.")

    def late(self, streams: Streams, stream: Stream) -> None:
        self.told.append(f"late {stream.id}")
        streams.answer(stream, b"", b"", b"\x08\x03408")

    def lost(self, stream: Stream) -> None:
        self.told.append(f"lost {stream.id}")


class Talk:
    """One connection."""

    def __init__(self, app: Application) -> None:
        self.refused: list[Code] = []
        self.settled: list[bool] = []
        self._out: list[bytes] = []
        self.streams = Streams(
            app, self._out.append, lambda code, _: self.refused.append(code), lambda: self.settled.append(True)
        )

    def say(self, *said: bytes) -> list[Frame]:
        data = b"".join(said)
        if not self.streams.cutter.greeted:
            assert self.streams.cutter.greet(data)
            data = b""
        self.streams.receive(data)
        return self.heard()

    def say_until_refused(self, said: Iterable[bytes]) -> Code:
        for one in said:
            try:
                self.say(one)
            except ConnectionFault as fault:
                return fault.code
        raise AssertionError("nothing was refused")

    def heard(self) -> list[Frame]:
        found = cut(b"".join(self._out))
        self._out.clear()
        return found


class Echoing(Talk):
    def __init__(self) -> None:
        self.app = Echo()
        super().__init__(self.app)


def greeted() -> Echoing:
    made = Echoing()
    assert made.say(HELLO) == [(frames.SETTINGS, frames.ACK, 0, b"")]
    return made


def answers(found: list[Frame]) -> dict[int, bytes]:
    return {number: payload for kind, _, number, payload in found if kind == frames.DATA}


def resets(found: list[Frame]) -> dict[int, Code]:
    return {
        number: Code(int.from_bytes(payload, "big")) for kind, _, number, payload in found if kind == frames.RST_STREAM
    }
