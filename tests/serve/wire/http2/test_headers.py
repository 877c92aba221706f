from __future__ import annotations

import pytest

from serve.wire.http2.frames import ErrorCode, StreamFault
from serve.wire.http2.headers import content_length, parse_request, validate_trailers
from serve.wire.http2.hpack import Field

PSEUDO: list[Field] = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/a")]


def test_request_fields_are_returned_by_name() -> None:
    found = parse_request([*PSEUDO, (b":authority", b"x"), (b"te", b"trailers"), (b"a", b"1"), (b"a", b"2")])
    assert found[b":path"] == b"/a"
    assert found[b"a"] == b"1, 2"


@pytest.mark.parametrize(
    "fields",
    [
        [*PSEUDO, (b":protocol", b"websocket")],
        [*PSEUDO, (b":", b"")],
        [*PSEUDO, (b"", b"")],
        [*PSEUDO, (b"a b", b"x")],
        [*PSEUDO, (b"a\x00", b"x")],
        [*PSEUDO, (b"caf\xe9", b"x")],
        [*PSEUDO, (b"a:b", b"x")],
        [*PSEUDO, (b"a", b"x\r\ny: z")],
        [*PSEUDO, (b"a", b"x\0")],
        [*PSEUDO, (b"a", b" x")],
        [*PSEUDO, (b"a", b"x\t")],
        [*PSEUDO, (b"a", b"1"), (b"a", b" x")],
        [*PSEUDO[:2], (b":path", b"/a\n")],
        [*PSEUDO, (b"transfer-encoding", b"chunked")],
        [*PSEUDO, (b"upgrade", b"h2c")],
        [*PSEUDO, (b"keep-alive", b"1")],
        [*PSEUDO, (b"proxy-connection", b"close")],
        [*PSEUDO, (b"te", b"gzip"), (b"te", b"trailers")],
        [*PSEUDO, (b":authority", b"a"), (b"host", b"b")],
        [*PSEUDO, (b":authority", b"a"), (b"host", b"a"), (b"host", b"a")],
    ],
)
def test_malformed_request_is_a_stream_fault(fields: list[Field]) -> None:
    with pytest.raises(StreamFault) as caught:
        parse_request(fields)
    assert caught.value.code is ErrorCode.PROTOCOL_ERROR


def test_repeated_field_may_have_an_empty_value() -> None:
    assert parse_request([*PSEUDO, (b"a", b"1"), (b"a", b""), (b"a", b"2")])[b"a"] == b"1, , 2"
    assert parse_request([*PSEUDO, (b"a", b"1"), (b"a", b"")])[b"a"] == b"1, "


@pytest.mark.parametrize("field", [(b":path", b"/"), (b"a b", b"1"), (b"a", b"1\r\nb: 2"), (b"connection", b"close")])
def test_malformed_trailer_is_a_stream_fault(field: Field) -> None:
    validate_trailers([(b"x-more", b"1")])
    with pytest.raises(StreamFault):
        validate_trailers([(b"x-more", b"1"), field])


@pytest.mark.parametrize(("value", "wanted"), [(b"0", 0), (b"17", 17)])
def test_content_length_is_a_number(value: bytes, wanted: int) -> None:
    assert content_length({b"content-length": value}) == wanted
    assert content_length({}) is None


@pytest.mark.parametrize("value", [b"", b"-1", b"1.5", b"0x10", b"1" * 30, b"\xb2"])
def test_invalid_content_length_is_malformed(value: bytes) -> None:
    with pytest.raises(StreamFault):
        content_length({b"content-length": value})
