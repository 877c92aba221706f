"""HTTP/2 frames (RFC 9113): reading, writing and validation."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MAX_FRAME_BYTES = 16384  # of a payload; a client may not send more unless our SETTINGS allow it, and they do not
MAX_WINDOW = (1 << 31) - 1
DEFAULT_WINDOW = 65535  # of the connection and of each stream, until SETTINGS or WINDOW_UPDATE change it

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY_FLAG = 0x1, 0x1, 0x4, 0x8, 0x20

MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = 3, 4, 5, 6
PRIORITY_BYTES = 5  # priorities of RFC 7540, which are deprecated and ignored here
_CONNECTION_FRAMES, _STREAM_FRAMES = frozenset((SETTINGS, PING, GOAWAY)), frozenset((PRIORITY, RST_STREAM))
_PAYLOAD_BYTES = {PRIORITY: PRIORITY_BYTES, RST_STREAM: 4, PING: 8, WINDOW_UPDATE: 4}
_ENABLE_PUSH, _MAX_FRAME_SIZE_LIMIT = 2, (1 << 24) - 1
_MAX_SETTINGS = 32  # in one frame: the standards define 8

FRAME_HEADER = struct.Struct(">HBBBI")  # upper 16 bits of the length, lower 8, type, flags, stream id
_SETTING = struct.Struct(">HI")

Frame = tuple[int, int, int, bytes]  # type, flags, stream id, payload


class ErrorCode(IntEnum):
    """The error codes of RFC 9113, section 7."""

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


class _Fault(Exception):
    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class ConnectionFault(_Fault):
    """A connection error: the connection has to be closed."""


class StreamFault(_Fault):
    """A stream error: one request is wrong, the others of its connection continue."""


class FrameReader:
    """Splits the received bytes into frames, after the connection preface."""

    __slots__ = ("_missing_bytes", "buffer", "has_preface")

    def __init__(self) -> None:
        self.buffer, self.has_preface = bytearray(), False
        self._missing_bytes = 0  # of the frame that the buffer begins with: its header, or all of it

    def read_preface(self, data: bytes) -> bool:
        """Return True once the preface is complete. Bytes after it stay in the buffer for `feed`."""
        self.buffer += data
        if not self.buffer.startswith(PREFACE):
            if not PREFACE.startswith(self.buffer):
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "this is not an HTTP/2 connection")
            return False
        del self.buffer[: len(PREFACE)]
        self.has_preface = True
        return True

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that are complete with these bytes; it has to be exhausted before the next call."""
        if self.buffer:
            # A frame may arrive byte by byte: its bytes are joined once, not at each of them.
            self.buffer += data
            self._missing_bytes -= len(data)
            if self._missing_bytes > 0:
                return
            data = bytes(self.buffer)
            self.buffer.clear()
        position, end, needed = 0, len(data), 9
        while end - position >= 9:
            high, low, kind, flags, stream_id = FRAME_HEADER.unpack_from(data, position)
            length = high << 8 | low
            if length > MAX_FRAME_BYTES:
                raise ConnectionFault(
                    ErrorCode.FRAME_SIZE_ERROR,
                    f"a frame of {length} bytes is larger than the maximum of {MAX_FRAME_BYTES}",
                )
            stop = position + 9 + length
            if stop > end:
                needed = 9 + length
                break
            yield kind, flags, stream_id & MAX_WINDOW, data[position + 9 : stop]
            position = stop
        if position < end:
            self.buffer += data[position:]
            self._missing_bytes = needed - (end - position)


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    size = len(payload)
    return FRAME_HEADER.pack(size >> 8, size & 0xFF, kind, flags, stream_id) + payload


def settings(values: dict[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join([_SETTING.pack(*pair) for pair in values.items()]))


def rst_stream(stream_id: int, code: ErrorCode) -> bytes:
    return frame(RST_STREAM, 0, stream_id, code.to_bytes(4, "big"))


def goaway(last_stream_id: int, code: ErrorCode, text: str = "") -> bytes:
    return frame(GOAWAY, 0, 0, last_stream_id.to_bytes(4, "big") + code.to_bytes(4, "big") + text.encode())


def window_update(stream_id: int, size: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream_id, size.to_bytes(4, "big"))


def strip_padding(flags: int, payload: bytes) -> bytes:
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "the padding of a frame is longer than its payload")
    return payload[1 : len(payload) - payload[0]]


def parse_settings(payload: bytes) -> Iterator[tuple[int, int]]:
    if len(payload) % _SETTING.size:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"the length of SETTINGS is no multiple of {_SETTING.size}")
    if len(payload) > _MAX_SETTINGS * _SETTING.size:
        raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, f"a frame has more than {_MAX_SETTINGS} settings")
    for key, value in _SETTING.iter_unpack(payload):
        if key == _ENABLE_PUSH and value > 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"ENABLE_PUSH must be 0 or 1, not {value}")
        if key == INITIAL_WINDOW_SIZE and value > MAX_WINDOW:
            raise ConnectionFault(
                ErrorCode.FLOW_CONTROL_ERROR, f"INITIAL_WINDOW_SIZE must be at most {MAX_WINDOW}, not {value}"
            )
        if key == MAX_FRAME_SIZE and not MAX_FRAME_BYTES <= value <= _MAX_FRAME_SIZE_LIMIT:
            raise ConnectionFault(
                ErrorCode.PROTOCOL_ERROR,
                f"MAX_FRAME_SIZE must be {MAX_FRAME_BYTES} to {_MAX_FRAME_SIZE_LIMIT}, not {value}",
            )
        yield key, value


def validate_frame(kind: int, flags: int, stream_id: int, payload: bytes) -> None:
    """Check stream id and length of a frame other than DATA, HEADERS and CONTINUATION."""
    if kind == PUSH_PROMISE:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a client must not send PUSH_PROMISE")
    if kind in _CONNECTION_FRAMES and stream_id:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "SETTINGS, PING and GOAWAY must have stream id 0")
    if kind in _STREAM_FRAMES and not stream_id:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PRIORITY and RST_STREAM must name a stream")
    size = len(payload)
    if kind == SETTINGS and flags & ACK and size:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS with ACK must be empty")
    if size != _PAYLOAD_BYTES.get(kind, size) or (kind == GOAWAY and size < _PAYLOAD_BYTES[PING]):
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"a frame of type {kind} must not have {size} bytes")
