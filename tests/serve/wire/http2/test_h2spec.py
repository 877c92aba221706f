"""The cases of h2spec, by its ids, with frames over a socket.

h2spec tests RFC 7540. Where RFC 9113 dropped or changed a rule, the case has a note, and the outcome is that of 9113.
Received frames are parsed with hyperframe and hpack. The case ends with a request and PING: what is sent before their
answers, or before GOAWAY, is the outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import hpack
import pytest
from h2.errors import ErrorCodes
from hpack.hpack import encode_integer
from hyperframe.frame import (
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from serve.wire.connection_limits import MAX_STREAMS
from serve.wire.http2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_FRAME_BYTES,
    MAX_FRAME_SIZE,
    MAX_WINDOW,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    ErrorCode,
    frame,
    rst_stream,
    settings,
    window_update,
)
from serve.wire.http2.hpack import Field
from tests.serve.wire.http2.frames import CLIENT_PREFACE, GRPC, data, encode_block, headers, request
from tests.serve.wire.http2.listener import Client, RunningListener, Scenario, start_listener

PROTOCOL_ERROR, STREAM_CLOSED = ErrorCodes.PROTOCOL_ERROR, ErrorCodes.STREAM_CLOSED
FRAME_SIZE_ERROR, FLOW_CONTROL_ERROR = ErrorCodes.FRAME_SIZE_ERROR, ErrorCodes.FLOW_CONTROL_ERROR
COMPRESSION_ERROR, REFUSED_STREAM = ErrorCodes.COMPRESSION_ERROR, ErrorCodes.REFUSED_STREAM


@dataclass(frozen=True)
class Outcome:
    """Frames that the server sends; the connection stays open unless there is a code of GOAWAY."""

    answers: dict[int, bytes] = field(default_factory=dict)  # bodies of complete answers, by stream
    begun: dict[int, bytes] = field(default_factory=dict)  # bodies so far of answers that wait for a window
    resets: dict[int, ErrorCodes] = field(default_factory=dict)
    goaway: ErrorCodes | None = None
    pings: list[bytes] = field(default_factory=list)
    settings_acks: int = 0


class Case(NamedTuple):
    id: str
    title: str
    sent: bytes
    outcome: Outcome = Outcome()
    note: str = ""
    preface: bytes = CLIENT_PREFACE


def connection_error(code: ErrorCodes, answers: dict[int, bytes] | None = None) -> Outcome:
    return Outcome(answers=answers or {}, goaway=code)


def stream_error(code: ErrorCodes, answers: dict[int, bytes] | None = None) -> Outcome:
    return Outcome(answers=answers or {}, resets={1: code})


def continuation(stream_id: int, fragment: bytes = b"", flags: int = END_HEADERS) -> bytes:
    return frame(CONTINUATION, flags, stream_id, fragment)


def priority(stream_id: int, depends_on: int = 0, weight: int = 255, *, exclusive: bool = False) -> bytes:
    return PriorityFrame(stream_id, depends_on=depends_on, stream_weight=weight, exclusive=exclusive).serialize()


def block(encoded: bytes) -> bytes:
    return frame(HEADERS, END_HEADERS | END_STREAM, 1, encoded)


def fields(**changes: bytes | None) -> list[Field]:
    """Return the fields of a request with some pseudo-header fields changed or left out."""
    changed = {f":{name}".encode(): value for name, value in changes.items()}
    return [(name, value) for name, old in GRPC if (value := changed.get(name, old)) is not None]


def whole(request_fields: list[Field], stream_id: int = 1) -> bytes:
    """Return a request without a body."""
    return headers(stream_id, request_fields, END_HEADERS | END_STREAM)


def literal(mode: int, bits: int, index: int, *, huffman: bool) -> bytes:
    """Encode a field as a literal; index 0 stands for a new name."""
    first = encode_integer(index, bits)
    first[0] |= mode
    return bytes(first) + (b"" if index else string(b"x-name", huffman=huffman)) + string(b"value", huffman=huffman)


def string(value: bytes, *, huffman: bool) -> bytes:
    encoded = hpack.Encoder().huffman_coder.encode(value) if huffman else value
    return bytes([huffman << 7 | len(encoded)]) + encoded


BLOCK = encode_block(GRPC)
WHOLE = whole(GRPC)
OPEN = headers(1)
HALF_CLOSED = whole(fields(path=b"/waits"))  # until the test ends
CANCELLED = OPEN + rst_stream(1, ErrorCode.CANCEL)
ANSWERED, ECHOED, PONG = Outcome({1: b""}), Outcome({1: b"hello"}), Outcome(pings=[b"8 bytes."])
INCREMENTAL, WITHOUT, NEVER, USER_AGENT = (0x40, 6), (0x00, 4), (0x10, 4), 58


def settings_in_order(*values: tuple[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(key.to_bytes(2) + value.to_bytes(4) for key, value in values))


def generic() -> Iterator[Case]:
    yield Case("generic/1/1", "a preface", b"")
    yield Case("generic/2/1", "PRIORITY of an idle stream", priority(1))
    no_window = settings({INITIAL_WINDOW_SIZE: 0})
    part = Outcome(begun={1: b"h"}, settings_acks=1)
    yield Case("generic/2/2", "WINDOW_UPDATE, half-closed", no_window + request(1) + window_update(1, 1), part)
    yield Case("generic/2/3", "PRIORITY, half-closed", no_window + request(1) + priority(1) + window_update(1, 1), part)
    yield Case("generic/2/4", "RST_STREAM, half-closed", HALF_CLOSED + rst_stream(1, ErrorCode.CANCEL))
    yield Case("generic/2/5", "PRIORITY of a closed stream", WHOLE + priority(1), ANSWERED)
    yield Case("generic/3.1/1", "DATA", OPEN + data(1, b"hello"), ECHOED)
    yield Case("generic/3.1/2", "several DATA", OPEN + data(1, b"he", 0) + data(1, b"llo"), ECHOED)
    padded = DataFrame(1, b"hello", pad_length=8, flags=["PADDED", "END_STREAM"]).serialize()
    yield Case("generic/3.1/3", "padded DATA", OPEN + padded, ECHOED)
    yield Case("generic/3.2/1", "HEADERS", WHOLE, ANSWERED)
    flags = ["END_STREAM", "END_HEADERS"]
    padded = HeadersFrame(1, BLOCK, pad_length=8, flags=[*flags, "PADDED"]).serialize()
    yield Case("generic/3.2/2", "padded HEADERS", padded, ANSWERED)
    ranked = HeadersFrame(1, BLOCK, stream_weight=9, flags=[*flags, "PRIORITY"]).serialize()
    yield Case("generic/3.2/3", "HEADERS with a priority", ranked, ANSWERED)
    yield Case("generic/3.3/1", "PRIORITY with the least weight", priority(1, weight=0) + WHOLE, ANSWERED)
    yield Case("generic/3.3/2", "PRIORITY with the greatest weight", priority(1, weight=255) + WHOLE, ANSWERED)
    yield Case("generic/3.3/3", "PRIORITY with a dependency", priority(3, depends_on=1) + WHOLE, ANSWERED)
    yield Case("generic/3.3/4", "exclusive PRIORITY", priority(1, exclusive=True) + WHOLE, ANSWERED)
    yield Case("generic/3.3/5", "PRIORITY of an idle stream, then a lower one", priority(3) + WHOLE, ANSWERED)
    yield Case("generic/3.4/1", "RST_STREAM", CANCELLED)
    yield Case("generic/3.5/1", "SETTINGS", settings({}), Outcome(settings_acks=1))
    yield Case("generic/3.7/1", "PING", frame(PING, 0, 0, b"8 bytes."), PONG)
    yield Case("generic/3.8/1", "GOAWAY", frame(GOAWAY, 0, 0, bytes(8)), note="h2spec also accepts the end")
    yield Case("generic/3.9/1", "WINDOW_UPDATE of the connection", window_update(0, 1) + WHOLE, ANSWERED)
    yield Case("generic/3.9/2", "WINDOW_UPDATE of a stream", OPEN + window_update(1, 1) + data(1, b""), ANSWERED)
    begin = frame(HEADERS, END_STREAM, 1, BLOCK[:9])
    yield Case("generic/3.10/1", "CONTINUATION", begin + continuation(1, BLOCK[9:]), ANSWERED)
    split = begin + continuation(1, BLOCK[9:20], 0) + continuation(1, BLOCK[20:])
    yield Case("generic/3.10/2", "several CONTINUATION", split, ANSWERED)
    yield Case("generic/4/1", "GET", whole(fields(method=b"GET")), ANSWERED)
    yield Case("generic/4/2", "HEAD", whole(fields(method=b"HEAD")), ANSWERED)
    yield Case("generic/4/3", "POST", request(1), ECHOED)
    trailers = whole([(b"x-more", b"1")])
    yield Case("generic/4/4", "POST with trailers", OPEN + data(1, b"hello", 0) + trailers, ECHOED)


def generic_hpack() -> Iterator[Case]:
    yield Case("generic/5/1", "an indexed field", block(BLOCK + b"\x90"), ANSWERED)
    number = 1
    for mode, title in ((INCREMENTAL, "with indexing"), (WITHOUT, "without indexing"), (NEVER, "never indexed")):
        for index in (USER_AGENT, 0):
            for huffman in (False, True):
                number += 1
                what = f"a literal {title}, {'indexed' if index else 'new'} name{', Huffman' * huffman}"
                yield Case(f"generic/5/{number}", what, block(BLOCK + literal(*mode, index, huffman=huffman)), ANSWERED)
    yield Case("generic/5/14", "a table size update", block(b"\x20" + BLOCK), ANSWERED)
    yield Case("generic/5/15", "several table size updates", block(b"\x20\x3f\xe1\x1f" + BLOCK), ANSWERED)


def starting_and_frames() -> Iterator[Case]:
    yield Case("http2/3.5/1", "a preface, answered by SETTINGS", b"")
    yield Case(
        "http2/3.5/2",
        "another preface",
        b"",
        connection_error(PROTOCOL_ERROR),
        preface=b"PRI * HTTP/3.0" + PREFACE[14:],
    )
    yield Case("http2/4.1/1", "a frame of unknown type", frame(0x16, 0, 0, bytes(8)))
    yield Case("http2/4.1/2", "flags that PING does not define", frame(PING, 0x16, 0, b"8 bytes."), PONG)
    yield Case("http2/4.1/3", "the reserved bit of the stream id", frame(PING, 0, 1 << 31, b"8 bytes."), PONG)
    longest, too_large = b"x" * MAX_FRAME_BYTES, connection_error(FRAME_SIZE_ERROR)
    yield Case("http2/4.2/1", "DATA of the maximum size", OPEN + data(1, longest), Outcome({1: longest}))
    yield Case("http2/4.2/2", "DATA one byte larger", OPEN + data(1, longest + b"x"), too_large)
    too_long = block(BLOCK + b"\x82" * MAX_FRAME_BYTES)
    yield Case("http2/4.2/3", "HEADERS that are too large", too_long, too_large)
    yield Case("http2/4.3/1", "a truncated header block", block(b"\x41"), connection_error(COMPRESSION_ERROR))
    begun = headers(1, flags=0)
    yield Case("http2/4.3/2", "PRIORITY within headers", begun + priority(1), connection_error(PROTOCOL_ERROR))
    yield Case("http2/4.3/3", "HEADERS within headers", begun + headers(3), connection_error(PROTOCOL_ERROR))


def streams_and_multiplexing() -> Iterator[Case]:
    unopened, closed = connection_error(PROTOCOL_ERROR), connection_error(STREAM_CLOSED)
    yield Case("http2/5.1/1", "DATA, idle", data(1, b"x"), unopened)
    yield Case("http2/5.1/2", "RST_STREAM, idle", rst_stream(1, ErrorCode.CANCEL), unopened)
    yield Case("http2/5.1/3", "WINDOW_UPDATE, idle", window_update(1, 100), unopened)
    yield Case("http2/5.1/4", "CONTINUATION, idle", continuation(1, BLOCK), unopened)
    yield Case("http2/5.1/5", "DATA, half-closed", HALF_CLOSED + data(1, b"x"), stream_error(STREAM_CLOSED))
    yield Case("http2/5.1/6", "HEADERS, half-closed", HALF_CLOSED + WHOLE, stream_error(STREAM_CLOSED))
    yield Case("http2/5.1/7", "CONTINUATION, half-closed", HALF_CLOSED + continuation(1, BLOCK), unopened)
    yield Case("http2/5.1/8", "DATA after RST_STREAM", CANCELLED + data(1, b"x"), stream_error(STREAM_CLOSED))
    yield Case("http2/5.1/9", "HEADERS after RST_STREAM", CANCELLED + WHOLE, closed)
    yield Case("http2/5.1/10", "CONTINUATION after RST_STREAM", CANCELLED + continuation(1, BLOCK), unopened)
    yield Case(
        "http2/5.1/11",
        "DATA, closed",
        WHOLE + data(1, b"x"),
        stream_error(STREAM_CLOSED, {1: b""}),
        note="a connection error in RFC 7540; 9113 permits one (5.1) and requires a stream error (6.1)",
    )
    yield Case("http2/5.1/12", "HEADERS, closed", WHOLE + WHOLE, connection_error(STREAM_CLOSED, {1: b""}))
    after = WHOLE + continuation(1, BLOCK)
    yield Case("http2/5.1/13", "CONTINUATION, closed", after, connection_error(PROTOCOL_ERROR, {1: b""}))
    yield Case("http2/5.1.1/1", "an even stream id", whole(GRPC, 2), unopened)
    lower = whole(GRPC, 5) + whole(GRPC, 3)
    yield Case("http2/5.1.1/2", "a lower stream id", lower, connection_error(PROTOCOL_ERROR, {5: b""}))
    yield Case("http2/5.1.1/3", "the same stream id", HALF_CLOSED + WHOLE, stream_error(STREAM_CLOSED))
    limit = 2 * MAX_STREAMS
    many = b"".join(headers(stream_id) for stream_id in range(1, limit, 2))
    yield Case(
        "http2/5.1.2/1",
        "a stream more than MAX_CONCURRENT_STREAMS",
        many + whole(GRPC, limit + 1) + rst_stream(1, ErrorCode.CANCEL),
        Outcome(resets={limit + 1: REFUSED_STREAM}),
    )
    dropped = "a stream error in RFC 7540; 9113 dropped priorities, and they are ignored"
    itself = HeadersFrame(1, BLOCK, depends_on=1, flags=["END_STREAM", "END_HEADERS", "PRIORITY"]).serialize()
    yield Case("http2/5.3.1/1", "HEADERS that depend on their stream", itself, ANSWERED, dropped)
    yield Case("http2/5.3.1/2", "PRIORITY that depends on its stream", priority(1, depends_on=1), note=dropped)
    ping = frame(PING, 0, 3, bytes(8))
    yield Case("http2/5.4.1/1", "an error that closes the connection", ping, connection_error(PROTOCOL_ERROR))
    yield Case("http2/5.4.1/2", "the same, after GOAWAY", ping, connection_error(PROTOCOL_ERROR))
    unknown = frame(0x16, 0, 0, bytes(8))
    yield Case("http2/5.5/1", "an unknown extension", unknown)
    yield Case("http2/5.5/2", "the same within headers", headers(1, flags=0) + unknown, unopened)


def data_to_settings() -> Iterator[Case]:
    protocol, size = connection_error(PROTOCOL_ERROR), connection_error(FRAME_SIZE_ERROR)
    yield Case("http2/6.1/1", "DATA of no stream", data(0, b"x"), protocol)
    yield Case("http2/6.1/2", "DATA after END_STREAM", HALF_CLOSED + data(1, b"x"), stream_error(STREAM_CLOSED))
    yield Case("http2/6.1/3", "DATA with too much padding", OPEN + frame(DATA, PADDED, 1, b"\6hello"), protocol)
    begun = headers(1, flags=0)
    yield Case("http2/6.2/1", "HEADERS, then PRIORITY and not CONTINUATION", begun + priority(1), protocol)
    yield Case("http2/6.2/2", "HEADERS, then those of another stream", begun + headers(3), protocol)
    yield Case("http2/6.2/3", "HEADERS of no stream", headers(0), protocol)
    padded = frame(HEADERS, PADDED | END_HEADERS, 1, bytes([len(BLOCK) + 1]) + BLOCK)
    yield Case("http2/6.2/4", "HEADERS with too much padding", padded, protocol)
    yield Case("http2/6.3/1", "PRIORITY of no stream", frame(PRIORITY, 0, 0, bytes(5)), protocol)
    permitted = "a stream error, which may end the connection (5.4.1): for an idle stream it has to"
    yield Case("http2/6.3/2", "PRIORITY of 4 bytes", OPEN + frame(PRIORITY, 0, 1, bytes(4)), size, permitted)
    yield Case("http2/6.4/1", "RST_STREAM of no stream", rst_stream(0, ErrorCode.CANCEL), protocol)
    yield Case("http2/6.4/2", "RST_STREAM of an idle stream", rst_stream(1, ErrorCode.CANCEL), protocol)
    yield Case("http2/6.4/3", "RST_STREAM of 3 bytes", OPEN + frame(RST_STREAM, 0, 1, bytes(3)), size)
    yield Case("http2/6.5/1", "SETTINGS with ACK and a payload", frame(SETTINGS, ACK, 0, bytes(6)), size)
    yield Case("http2/6.5/2", "SETTINGS of a stream", frame(SETTINGS, 0, 1, bytes(6)), protocol)
    yield Case("http2/6.5/3", "SETTINGS of 3 bytes", frame(SETTINGS, 0, 0, bytes(3)), size)
    yield Case("http2/6.5.2/1", "ENABLE_PUSH 2", settings({2: 2}), protocol)
    wide = settings({INITIAL_WINDOW_SIZE: MAX_WINDOW + 1})
    yield Case("http2/6.5.2/2", "INITIAL_WINDOW_SIZE too large", wide, connection_error(FLOW_CONTROL_ERROR))
    yield Case("http2/6.5.2/3", "MAX_FRAME_SIZE too small", settings({MAX_FRAME_SIZE: MAX_FRAME_BYTES - 1}), protocol)
    yield Case("http2/6.5.2/4", "MAX_FRAME_SIZE too large", settings({MAX_FRAME_SIZE: 1 << 24}), protocol)
    yield Case("http2/6.5.2/5", "an unknown setting", settings({0xFF: 1}), Outcome(settings_acks=1))
    twice = settings_in_order((INITIAL_WINDOW_SIZE, 100), (INITIAL_WINDOW_SIZE, 1))
    part = Outcome(begun={1: b"h"}, settings_acks=1)
    yield Case("http2/6.5.3/1", "INITIAL_WINDOW_SIZE twice, the last counts", twice + request(1), part)
    yield Case("http2/6.5.3/2", "SETTINGS, acknowledged at once", settings({2: 0}), Outcome(settings_acks=1))


def ping_to_continuation() -> Iterator[Case]:
    protocol, size = connection_error(PROTOCOL_ERROR), connection_error(FRAME_SIZE_ERROR)
    overflow = connection_error(FLOW_CONTROL_ERROR)
    yield Case("http2/6.7/1", "PING", frame(PING, 0, 0, b"8 bytes."), PONG)
    yield Case("http2/6.7/2", "PING with ACK, not answered", frame(PING, ACK, 0, b"8 bytes."))
    yield Case("http2/6.7/3", "PING of a stream", frame(PING, 0, 1, bytes(8)), protocol)
    yield Case("http2/6.7/4", "PING of 6 bytes", frame(PING, 0, 0, bytes(6)), size)
    yield Case("http2/6.8/1", "GOAWAY of a stream", frame(GOAWAY, 0, 1, bytes(8)), protocol)
    yield Case("http2/6.9/1", "WINDOW_UPDATE of 0", window_update(0, 0), protocol)
    yield Case("http2/6.9/2", "WINDOW_UPDATE of 0, stream", OPEN + window_update(1, 0), stream_error(PROTOCOL_ERROR))
    yield Case("http2/6.9/3", "WINDOW_UPDATE of 3 bytes", frame(WINDOW_UPDATE, 0, 0, bytes(3)), size)
    narrow = settings({INITIAL_WINDOW_SIZE: 1})
    part = Outcome(begun={1: b"h"}, settings_acks=1)
    yield Case("http2/6.9.1/1", "a window of 1 byte", narrow + request(1), part)
    yield Case("http2/6.9.1/2", "a window too wide", window_update(0, MAX_WINDOW) * 2, overflow)
    widened = OPEN + window_update(1, MAX_WINDOW) * 2
    yield Case("http2/6.9.1/3", "a stream's window too wide", widened, stream_error(FLOW_CONTROL_ERROR))
    later = settings({INITIAL_WINDOW_SIZE: 0}) + request(1) + narrow
    yield Case("http2/6.9.2/1", "a wider window during a request", later, Outcome(begun={1: b"h"}, settings_acks=2))
    negative = settings({INITIAL_WINDOW_SIZE: 3}) + request(1) + settings({INITIAL_WINDOW_SIZE: 2})
    part = Outcome(begun={1: b"hell"}, settings_acks=2)
    yield Case("http2/6.9.2/2", "a negative window, then 1 byte", negative + window_update(1, 2), part)
    yield Case("http2/6.9.2/3", "windows too wide", settings({INITIAL_WINDOW_SIZE: MAX_WINDOW + 1}), overflow)
    begin, rest = frame(HEADERS, END_STREAM, 1, BLOCK[:9]), continuation(1, BLOCK[9:])
    three = begin + continuation(1, BLOCK[9:20], 0) + continuation(1, BLOCK[20:])
    yield Case("http2/6.10/1", "several CONTINUATION", three, ANSWERED)
    yield Case("http2/6.10/2", "CONTINUATION, then DATA", begin + continuation(1, b"", 0) + data(1, b"x"), protocol)
    yield Case("http2/6.10/3", "CONTINUATION of no stream", begin + continuation(0, BLOCK[9:]), protocol)
    ended = connection_error(PROTOCOL_ERROR, {1: b""})
    yield Case("http2/6.10/4", "CONTINUATION after END_HEADERS", WHOLE + rest, ended)
    yield Case("http2/6.10/5", "the same after another CONTINUATION", begin + rest + rest, ended)
    yield Case("http2/6.10/6", "CONTINUATION after DATA", OPEN + data(1, b"x", 0) + continuation(1), protocol)


def error_codes_and_messages() -> Iterator[Case]:
    malformed = stream_error(PROTOCOL_ERROR)
    yield Case("http2/7/1", "GOAWAY with an unknown code", frame(GOAWAY, 0, 0, bytes(7) + b"\xff"))
    yield Case("http2/7/2", "RST_STREAM with an unknown code", OPEN + frame(RST_STREAM, 0, 1, b"\0\0\0\xff"))
    yield Case("http2/8.1/1", "HEADERS in a request, without END_STREAM", OPEN + headers(1, [(b"a", b"b")]), malformed)
    yield Case("http2/8.1.2/1", "an upper-case name", whole([*GRPC, (b"X-Test", b"1")]), malformed)
    yield Case("http2/8.1.2.1/1", "an unknown pseudo-header", whole([(b":test", b"1"), *GRPC]), malformed)
    yield Case("http2/8.1.2.1/2", "a pseudo-header of responses", whole([(b":status", b"200"), *GRPC]), malformed)
    yield Case("http2/8.1.2.1/3", "a pseudo-header as trailer", OPEN + whole([(b":method", b"POST")]), malformed)
    yield Case("http2/8.1.2.1/4", "a pseudo-header behind a field", whole([(b"te", b"trailers"), *GRPC]), malformed)
    yield Case("http2/8.1.2.2/1", "the field connection", whole([*GRPC, (b"connection", b"keep-alive")]), malformed)
    yield Case("http2/8.1.2.2/2", "te: trailers, deflate", whole([*GRPC, (b"te", b"trailers, deflate")]), malformed)
    yield Case("http2/8.1.2.3/1", "an empty :path", whole(fields(path=b"")), malformed)
    missing = ("method", "scheme", "path")
    for number, name in enumerate(missing, 2):
        yield Case(f"http2/8.1.2.3/{number}", f"no :{name}", whole(fields(**{name: None})), malformed)
    for number, name in enumerate(missing, 5):
        repeated = [field for field in GRPC if field[0] == f":{name}".encode()]
        yield Case(f"http2/8.1.2.3/{number}", f"two of :{name}", whole([*repeated, *GRPC]), malformed)
    one_byte = headers(1, [*GRPC, (b"content-length", b"1")])
    yield Case("http2/8.1.2.6/1", "content-length less than DATA", one_byte + data(1, b"test"), malformed)
    yield Case("http2/8.1.2.6/2", "the same, two DATA", one_byte + data(1, b"te", 0) + data(1, b"st"), malformed)
    promise = frame(PUSH_PROMISE, END_HEADERS, 1, b"\0\0\0\2" + BLOCK)
    yield Case("http2/8.2/1", "PUSH_PROMISE", OPEN + promise, connection_error(PROTOCOL_ERROR))


def hpack_errors() -> Iterator[Case]:
    for name, title, encoded in (
        ("2.3.3/1", "an index outside the tables", b"\xc6"),
        ("2.3.3/2", "a literal with such an index", b"\x7f\x07\5value"),
        ("4.2/1", "a table size update at the end", b"\x21"),
        ("5.2/1", "Huffman padding of 8 bits", b"\0\x86" + string(b"x-name", huffman=True)[1:] + b"\xff\0"),
        ("5.2/2", "Huffman padding of zeros", b"\0\x01a\x81\x18"),
        ("5.2/3", "the end symbol of Huffman's code", b"\0\x01a\x84\xff\xff\xff\xff"),
        ("6.1/1", "index 0", b"\x80"),
    ):
        yield Case(f"hpack/{name}", title, block(BLOCK + encoded), connection_error(COMPRESSION_ERROR))
    too_large = block(b"\x3f\xe2\x1f" + BLOCK)
    yield Case("hpack/6.3/1", "a table size above the limit", too_large, connection_error(COMPRESSION_ERROR))


GROUPS: tuple[Callable[[], Iterator[Case]], ...] = (
    generic,
    generic_hpack,
    starting_and_frames,
    streams_and_multiplexing,
    data_to_settings,
    ping_to_continuation,
    error_codes_and_messages,
    hpack_errors,
)
CASES = [case for group in GROUPS for case in group()]
LAST_STREAM, LAST_PING = MAX_WINDOW, b"the end."
END = request(LAST_STREAM) + frame(PING, 0, 0, LAST_PING)


async def receive_frame(client: Client) -> Frame:
    received, size = Frame.parse_frame_header(memoryview(await client.reader.readexactly(9)), strict=True)
    received.parse_body(memoryview(await client.reader.readexactly(size)))
    return received


def note_frame(found: Outcome, received: Frame, decoder: hpack.Decoder) -> None:
    number = received.stream_id
    if isinstance(received, HeadersFrame):
        answer = dict(decoder.decode(received.data, raw=True))
        if "END_STREAM" in received.flags:
            found.answers[number] = found.begun.pop(number)
        else:
            assert answer[b":status"] == b"200"
            found.begun[number] = b""
    elif isinstance(received, DataFrame):
        found.begun[number] += received.data
    elif isinstance(received, RstStreamFrame):
        found.resets[number] = ErrorCodes(received.error_code)
    elif isinstance(received, PingFrame):
        assert "ACK" in received.flags
        found.pings.append(received.opaque_data)
    else:
        assert isinstance(received, WindowUpdateFrame)


async def receive_outcome(client: Client) -> Outcome:
    found, decoder, acks = Outcome(), hpack.Decoder(), 0
    first = await receive_frame(client)
    assert isinstance(first, SettingsFrame) and "ACK" not in first.flags
    while LAST_PING not in found.pings:
        received = await receive_frame(client)
        if isinstance(received, SettingsFrame):
            acks += "ACK" in received.flags
        elif isinstance(received, GoAwayFrame):
            assert await client.reader.read() == b""
            found = replace(found, goaway=ErrorCodes(received.error_code))
            break
        else:
            note_frame(found, received, decoder)
    else:
        found.pings.remove(LAST_PING)
        (found.answers if LAST_STREAM in found.answers else found.begun).pop(LAST_STREAM)
    return replace(found, settings_acks=max(0, acks - 1))  # the first is for the preface


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[Scenario], None]]:
    with start_listener() as run_scenario:
        yield run_scenario


@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_case(run: Callable[[Scenario], None], case: Case) -> None:
    async def scenario(port: RunningListener) -> None:
        client = await port.open(b"")
        await client.send(case.preface, case.sent, END)
        assert await receive_outcome(client) == case.outcome, case.title

    run(scenario)


def test_every_case_is_listed_once() -> None:
    assert len({case.id for case in CASES}) == len(CASES) == 148
