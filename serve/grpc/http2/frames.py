"""The frames of HTTP/2 (RFC 9113): cut from what comes in, made for what goes out, and what is wrong with them."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_BYTES = 16384  # of a payload at most; nobody may send more to who has not asked for it
MOST_WINDOW = (1 << 31) - 1
FIRST_WINDOW = 65535  # of a connection and of its streams, until something else is said

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITIZED = 0x1, 0x1, 0x4, 0x8, 0x20

MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = 3, 4, 5, 6
PRIORITY_BYTES = 5  # the older standard's, which we do not read
_OF_CONNECTIONS, _OF_STREAMS = frozenset((SETTINGS, PING, GOAWAY)), frozenset((PRIORITY, RST_STREAM))
_SIZES = {PRIORITY: PRIORITY_BYTES, RST_STREAM: 4, PING: 8, WINDOW_UPDATE: 4}
_ENABLE_PUSH, _MOST_FRAME_BYTES = 2, (1 << 24) - 1

HEAD = struct.Struct(">HBBBI")  # the length's upper 16 bits and lower 8, the type, the flags, the stream
_SETTING = struct.Struct(">HI")

Frame = tuple[int, int, int, bytes]  # type, flags, stream, payload


class Code(IntEnum):
    """Why a stream or a connection ends, as the standard numbers it."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


class ConnectionFault(Exception):
    """Nothing more can be understood, or is wanted, of this client's connection."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code


class StreamFault(Exception):
    """One request is wrong; the others on its connection are not."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code


class Cutter:
    """Bytes in as they come; whole frames out, after a greeting."""

    __slots__ = ("greeted", "rest")

    def __init__(self) -> None:
        self.rest, self.greeted = b"", False

    def feed(self, data: bytes) -> Iterator[Frame]:
        if self.rest:
            data = self.rest + data
        position, end = 0, len(data)
        while end - position >= 9:
            high, low, kind, flags, stream_id = HEAD.unpack_from(data, position)
            length = high << 8 | low
            if length > FRAME_BYTES:
                raise ConnectionFault(
                    Code.FRAME_SIZE_ERROR, f"a frame of {length} bytes, where {FRAME_BYTES} are allowed"
                )
            stop = position + 9 + length
            if stop > end:
                break
            yield kind, flags, stream_id & MOST_WINDOW, data[position + 9 : stop]
            position = stop
        self.rest = data[position:]

    def greet(self, data: bytes) -> bool:
        """The beginning of all; True when it is whole, and what is behind it waits to be fed."""
        self.rest += data
        if not self.rest.startswith(PREFACE):
            if not PREFACE.startswith(self.rest):
                raise ConnectionFault(Code.PROTOCOL_ERROR, "this is no HTTP/2 connection")
            return False
        self.rest, self.greeted = self.rest[len(PREFACE) :], True
        return True


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    size = len(payload)
    return HEAD.pack(size >> 8, size & 0xFF, kind, flags, stream_id) + payload


def settings(values: dict[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join([_SETTING.pack(*pair) for pair in values.items()]))


def reset(stream_id: int, code: Code) -> bytes:
    return frame(RST_STREAM, 0, stream_id, code.to_bytes(4, "big"))


def goaway(last_stream_id: int, code: Code, text: str = "") -> bytes:
    return frame(GOAWAY, 0, 0, last_stream_id.to_bytes(4, "big") + code.to_bytes(4, "big") + text.encode())


def window_update(stream_id: int, size: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream_id, size.to_bytes(4, "big"))


def unpadded(flags: int, payload: bytes) -> bytes:
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise ConnectionFault(Code.PROTOCOL_ERROR, "a frame is padded with more than it holds")
    return payload[1 : len(payload) - payload[0]]


def settings_of(payload: bytes) -> Iterator[tuple[int, int]]:
    """Those that come, each checked."""
    if len(payload) % _SETTING.size:
        raise ConnectionFault(Code.FRAME_SIZE_ERROR, "a SETTINGS frame of no whole number of settings")
    for key, value in _SETTING.iter_unpack(payload):
        if key == _ENABLE_PUSH and value > 1:
            raise ConnectionFault(Code.PROTOCOL_ERROR, f"ENABLE_PUSH is 0 or 1, not {value}")
        if key == INITIAL_WINDOW_SIZE and value > MOST_WINDOW:
            raise ConnectionFault(Code.FLOW_CONTROL_ERROR, f"a window of {value} bytes")
        if key == MAX_FRAME_SIZE and not FRAME_BYTES <= value <= _MOST_FRAME_BYTES:
            raise ConnectionFault(Code.PROTOCOL_ERROR, f"MAX_FRAME_SIZE is {FRAME_BYTES} or more, not {value}")
        yield key, value


def check(kind: int, flags: int, stream_id: int, payload: bytes) -> None:
    """Of a frame that is neither DATA nor of a head: whether it can be one."""
    if kind == PUSH_PROMISE:
        raise ConnectionFault(Code.PROTOCOL_ERROR, "a client promises nothing")
    if kind in _OF_CONNECTIONS and stream_id:
        raise ConnectionFault(Code.PROTOCOL_ERROR, "a frame of the connection that names a stream")
    if kind in _OF_STREAMS and not stream_id:
        raise ConnectionFault(Code.PROTOCOL_ERROR, "a frame of a stream that names none")
    size = len(payload)
    if kind == SETTINGS and flags & ACK and size:
        raise ConnectionFault(Code.FRAME_SIZE_ERROR, "a SETTINGS frame that acknowledges, and says something")
    if size != _SIZES.get(kind, size) or (kind == GOAWAY and size < _SIZES[PING]):
        fault = StreamFault if kind == PRIORITY else ConnectionFault
        raise fault(Code.FRAME_SIZE_ERROR, f"a frame of type {kind} with {size} bytes")
