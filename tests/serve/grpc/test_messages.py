from __future__ import annotations

import urllib.parse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.contract.errors import InvalidPayload
from serve.errors import TooLarge
from serve.grpc import messages
from serve.request_context import parse_grpc_timeout
from tests.serve.grpc.http2_frames import FUZZ_SETTINGS, decode_fields


@FUZZ_SETTINGS
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_percent_encoding_round_trip(text: str) -> None:
    encoded = messages.percent_encode(text)
    assert all(0x20 <= byte < 0x7F for byte in encoded)
    assert urllib.parse.unquote(encoded.decode()) == text


def test_status_headers_have_code_and_message() -> None:
    assert decode_fields(messages.status_headers("NOT_FOUND", "no 100 %")) == {
        b"grpc-status": b"5",
        b"grpc-message": b"no 100 %25",
    }


@pytest.mark.parametrize("text", ["x" * 2001, "\u00fd" * 20_000, "x" + "\U0001f600" * 20_000])
def test_long_text_of_a_status_is_cut_for_clients(text: str) -> None:
    encoded = messages.status_headers("INVALID_ARGUMENT", text)
    assert len(encoded) < 8192 - 1024, "room for other headers"
    decoded = urllib.parse.unquote(decode_fields(encoded)[b"grpc-message"].decode(), errors="strict")
    assert decoded.endswith("…") and text.startswith(decoded[:-1])
    assert len(decoded) > 490


@FUZZ_SETTINGS
@given(message=st.binary(max_size=100))
def test_message_framing_round_trip(message: bytes) -> None:
    assert messages.unframe_message(messages.frame_message(message), 100) == (message, False)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [(b"2H", 7200.0), (b"3M", 180.0), (b"20S", 20.0), (b"5m", 0.005), (b"7u", 7e-6), (b"99999999n", 0.099999999)],
)
def test_timeout_units(header: bytes, seconds: float) -> None:
    assert parse_grpc_timeout(header) == pytest.approx(seconds)


def test_missing_timeout_is_infinite() -> None:
    assert parse_grpc_timeout(None) == float("inf")


@pytest.mark.parametrize("header", [b"", b"S", b"5", b"5x", b"-1S", b"1.5S", b"123456789S", b"5 S", b"\xb2S"])
def test_invalid_timeout_is_rejected(header: bytes) -> None:
    with pytest.raises(InvalidPayload, match="grpc-timeout"):
        parse_grpc_timeout(header)


@pytest.mark.parametrize("cut", [[1, 1, 1, 1, 1], [5], [2, 4], [3, 90]])
def test_oversized_message_is_detected_by_its_prefix(cut: list[int]) -> None:
    data = b"\0\0\0\0\x65" + b"x" * 1000
    parts, position = [], 0
    for size in cut:
        parts.append(data[position : position + size])
        position += size
    with pytest.raises(TooLarge, match="of 101 bytes, it is larger than max, which is 100 bytes"):
        messages.check_size(parts, position, 100)
    messages.check_size(parts, position, 1000)


def test_message_longer_than_its_prefix_is_rejected() -> None:
    messages.check_size([b"\0\0\0\0\x01" + b"x" * 100], 105, 100)
    with pytest.raises(TooLarge):
        messages.check_size([b"\0\0\0\0\x01" + b"x" * 101], 106, 100)
