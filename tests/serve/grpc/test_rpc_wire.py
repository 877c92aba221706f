"""gRPC on the wire: headers and framing of calls, and the answers to wrong ones."""

from __future__ import annotations

import contextlib
import socket
import struct
import urllib.parse
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import grpc
import hpack
import httpx
import numpy as np
import pytest
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb

from serve.wire.http2 import frames
from serve.wire.http2.frames import END_HEADERS, END_STREAM, FRAME_HEADER, Frame
from serve.wire.http2.hpack import Field
from tests.serve.wire.http2.frames import CLIENT_PREFACE, data, headers

if TYPE_CHECKING:
    from tests.serve.conftest import Running


SERVICE = "/inference.GRPCInferenceService/"
CODES = {code.value[0]: code.name for code in grpc.StatusCode}
TENSOR = {"name": "image", "datatype": "FP32", "shape": [1, 1, 8, 8]}
GOOD = pb.ModelInferRequest(model_name="tiny", inputs=[TENSOR], raw_input_contents=[b"\0" * 256]).SerializeToString()
CALL: dict[bytes, bytes] = {
    b":method": b"POST",
    b":scheme": b"http",
    b":path": SERVICE.encode() + b"ModelInfer",
    b":authority": b"x",
    b"te": b"trailers",
    b"content-type": b"application/grpc",
}


def wrapped(message: bytes, flag: int = 0) -> bytes:
    return struct.pack(">BI", flag, len(message)) + message


Changes = dict[bytes, bytes | None]


class WireClient:
    """A connection that sends one call after the other."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), 20)
        self._file = self.sock.makefile("rb")
        self._decoder = hpack.Decoder()
        self._next = 1
        self.sock.sendall(CLIENT_PREFACE)

    def close(self) -> None:
        self._file.close()
        self.sock.close()

    def read_frame(self) -> Frame:
        high, low, kind, flags, stream_id = FRAME_HEADER.unpack(self._file.read(9))
        return kind, flags, stream_id, self._file.read(high << 8 | low)

    def call(
        self, body: bytes = wrapped(GOOD), changes: Changes | None = None, *, ends: bool = True
    ) -> tuple[dict[str, str], bytes]:
        """Send a call with some headers changed; None removes one."""
        fields = {**CALL, **(changes or {})}
        header_fields: list[Field] = [(name, value) for name, value in fields.items() if value is not None]
        self._next += 2
        self.sock.sendall(headers(self._next, header_fields))
        if body or ends:
            self.sock.sendall(data(self._next, body, END_STREAM if ends else 0))
        return self.answer(self._next)

    def call_with_large_header(self, size: int) -> tuple[dict[str, str], bytes]:
        """Send a call with a header of that size, in several frames."""
        self._next += 2
        whole = headers(self._next, [*CALL.items(), (b"x-much", b"y" * size)])[9:]
        pieces = [whole[place : place + 16384] for place in range(0, len(whole), 16384)]
        for place, piece in enumerate(pieces):
            kind = frames.CONTINUATION if place else frames.HEADERS
            self.sock.sendall(frames.frame(kind, END_HEADERS if piece is pieces[-1] else 0, self._next, piece))
        return self.answer(self._next)

    def answer(self, number: int) -> tuple[dict[str, str], bytes]:
        """Return all header fields and the body."""
        fields: dict[str, str] = {}
        body = b""
        while True:
            kind, flags, stream_id, payload = self.read_frame()
            assert kind != frames.GOAWAY, payload
            if stream_id != number:
                continue
            if kind == frames.DATA:
                body += payload
            elif kind == frames.HEADERS:
                assert flags & END_HEADERS
                fields |= {str(name): str(value) for name, value in self._decoder.decode(payload)}
            if flags & END_STREAM and kind in (frames.DATA, frames.HEADERS):
                fields["grpc-message"] = urllib.parse.unquote(fields.get("grpc-message", ""))
                return fields, body


@pytest.fixture(scope="module")
def wire(server: Running) -> Iterator[WireClient]:
    with contextlib.closing(WireClient(server.grpc_port)) as made:
        yield made


def test_answer_has_headers_message_and_status(wire: WireClient) -> None:
    fields, body = wire.call(changes={b"x-request-id": b"mine-7"})
    assert (fields[":status"], fields["content-type"], fields["grpc-status"]) == ("200", "application/grpc", "0")
    assert fields["x-request-id"] == "mine-7"
    assert fields["grpc-accept-encoding"] == "identity, deflate, gzip"
    flag, size = struct.unpack(">BI", body[:5])
    assert (flag, size) == (0, len(body) - 5)
    answer = pb.ModelInferResponse.FromString(body[5:])
    assert np.frombuffer(answer.raw_output_contents[0], np.float32).tolist() == [0.0] * 10


@pytest.mark.parametrize("kind", [b"application/grpc+proto", b"application/grpc; charset=utf-8"])
def test_content_type_variants_are_accepted(wire: WireClient, kind: bytes) -> None:
    assert wire.call(changes={b"content-type": kind})[0]["grpc-status"] == "0"


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_compressed_and_plain_messages_are_read(wire: WireClient, coding: str) -> None:
    stream = zlib.compressobj(wbits=31 if coding == "gzip" else 15)
    small = stream.compress(GOOD) + stream.flush()
    assert wire.call(wrapped(small, 1), changes={b"grpc-encoding": coding.encode()})[0]["grpc-status"] == "0"
    assert wire.call(changes={b"grpc-encoding": coding.encode()})[0]["grpc-status"] == "0"


HEADERS_CASES: list[tuple[Changes, str, str]] = [
    ({b":path": b"/inference.GRPCInferenceService/ModelStreamInfer"}, "UNIMPLEMENTED", "use ModelInfer"),
    ({b":path": b"/inference.GRPCInferenceService/Other"}, "UNIMPLEMENTED", "no method"),
    ({b":path": b"/other.Service/ModelInfer"}, "UNIMPLEMENTED", "no method"),
    ({b":path": b"/" + b"x" * 9000}, "UNIMPLEMENTED", "no method"),
    ({b":path": b"*"}, "UNIMPLEMENTED", "no method"),
    ({b"grpc-encoding": b"br"}, "UNIMPLEMENTED", "send one of identity, deflate, gzip"),
    ({b"grpc-encoding": b"gzip, gzip"}, "UNIMPLEMENTED", "send one of identity, deflate, gzip"),
    ({b"grpc-timeout": b"5"}, "INVALID_ARGUMENT", "grpc-timeout"),
    ({b"grpc-timeout": b"0n"}, "DEADLINE_EXCEEDED", ""),
    ({b"x-much": b""}, "RESOURCE_EXHAUSTED", "the head is longer than 32768 bytes"),
]


@pytest.mark.parametrize(("changes", "code", "named"), HEADERS_CASES)
def test_invalid_headers_are_rejected_with_a_message(wire: WireClient, changes: Changes, code: str, named: str) -> None:
    fields, _ = wire.call_with_large_header(40_000) if b"x-much" in changes else wire.call(changes=changes)
    assert (fields[":status"], CODES[int(fields["grpc-status"])]) == ("200", code)
    assert named in fields["grpc-message"]
    assert " " in fields["grpc-message"]
    assert "x-request-id" in fields


BODIES: list[tuple[bytes, Changes, str, str]] = [
    (b"", {}, "UNIMPLEMENTED", "none was sent"),
    (b"\0\0", {}, "INVALID_ARGUMENT", "ends after 2 bytes"),
    (wrapped(GOOD)[:-1], {}, "INVALID_ARGUMENT", f"ends after {len(GOOD) - 1} of its {len(GOOD)} bytes"),
    (wrapped(GOOD) + b"\0", {}, "UNIMPLEMENTED", "more than one"),
    (wrapped(GOOD) * 2, {}, "UNIMPLEMENTED", "more than one"),
    (wrapped(GOOD, 2), {}, "INVALID_ARGUMENT", "0 or 1, not 2"),
    (wrapped(GOOD, 1), {}, "INVALID_ARGUMENT", "names no encoding"),
    (wrapped(GOOD, 1), {b"grpc-encoding": b"gzip"}, "INVALID_ARGUMENT", "is not valid gzip"),
    (wrapped(zlib.compress(GOOD)[:-6], 1), {b"grpc-encoding": b"deflate"}, "INVALID_ARGUMENT", "ends in the middle"),
    (wrapped(b"\xff\xff"), {}, "INVALID_ARGUMENT", "no message of ModelInfer"),
]


@pytest.mark.parametrize(("body", "changes", "code", "named"), BODIES)
def test_invalid_body_is_rejected_with_a_message(
    wire: WireClient, body: bytes, changes: Changes, code: str, named: str
) -> None:
    fields, found = wire.call(body, changes=changes)
    assert (fields[":status"], CODES[int(fields["grpc-status"])], found) == ("200", code, b"")
    assert named in fields["grpc-message"]


@pytest.mark.parametrize(
    ("changes", "status", "named"),
    [
        ({b":method": b"GET"}, "405", "whose calls are POST"),
        ({b"content-type": None}, "415", "is no gRPC"),
        ({b"content-type": b"application/json"}, "415", "'application/json' is no gRPC"),
        ({b"content-type": b"application/grpc+json"}, "415", "is no gRPC"),
        ({b"content-type": b"application/grpcx"}, "415", "is no gRPC"),
    ],
)
def test_other_http_requests_get_an_http_error(wire: WireClient, changes: Changes, status: str, named: str) -> None:
    fields, body = wire.call(b"", ends=False, changes=changes)
    assert (fields[":status"], fields["content-type"]) == (status, "text/plain")
    assert named in body.decode()
    assert fields.get("allow") == ("POST" if status == "405" else None)


def test_every_answer_has_the_servers_headers(wire: WireClient, server: Running) -> None:
    probe: Changes = {b":path": SERVICE.encode() + b"ServerLive", b"x-request-id": b"mine-8"}
    assert wire.call(wrapped(b""), probe)[0]["x-request-id"] == "mine-8"
    refused = wire.call(b"", {b"content-type": None}, ends=False)[0]
    for fields in (wire.call()[0], wire.call(b"")[0], wire.call(wrapped(b""), probe)[0], refused):
        assert fields["x-served-by"] == str(server.process.pid)
        assert fields["x-request-id"]


def test_rejected_calls_are_counted(wire: WireClient, server: Running) -> None:
    wire.call(b"\0\0")
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    assert 'pipe_rejected_total{model="",reason="wire",version=""}' in text
