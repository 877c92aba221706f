from __future__ import annotations

import asyncio
import gzip
import urllib.parse
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.system.errors import InvalidPayload
from serve.errors import TooLarge
from serve.grpc import messages
from serve.grpc.open_inference import ModelInferRequest
from serve.limits import BodyLimits, Budget
from serve.request_context import RequestContext, parse_grpc_timeout
from tests.serve.protocol.test_tensors import _signature
from tests.serve.wire.http1.test_floods import counted_calls
from tests.serve.wire.http2.frames import FUZZ_SETTINGS, decode_fields


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


def decompress(data: bytes, most: int, budget: Budget) -> bytes:
    call = RequestContext({}, "")
    return asyncio.run(messages.decompress(data, "gzip", call, BodyLimits(most), budget))


def test_compressed_message_is_one_stream() -> None:
    budget = Budget()
    assert decompress(gzip.compress(b"message"), 100, budget) == b"message"
    with pytest.raises(InvalidPayload, match="goes on behind the end of its gzip data"):
        decompress(gzip.compress(b"") * 50_000, 1 << 20, budget)


def test_message_takes_memory_of_the_budget_while_it_is_decompressed() -> None:
    budget = Budget(1 << 20)
    with pytest.raises(TooLarge, match="there are 1 MiB for requests"):
        decompress(gzip.compress(bytes(8 << 20)), 64 << 20, budget)
    assert budget.held_bytes <= budget.total_bytes


def test_message_that_inflates_too_much_is_refused() -> None:
    with pytest.raises(TooLarge, match="more than 100 times as large"):
        decompress(gzip.compress(bytes(60 << 20)), 64 << 20, Budget())


FLOODS: dict[str, dict[str, Any]] = {
    "inputs: 20000 in one request; the model has 1": {"inputs": [{}] * 20_000},
    "outputs: 20000 in one request; the model has 1": {"outputs": [{}] * 20_000},
    "raw_input_contents: 20000 given for 1 inputs": {"inputs": [{"name": "x"}], "raw_input_contents": [b""] * 20_000},
    "parameters: 20000 parameters; send at most 100": {
        "parameters": {f"k{number}": {"bool_param": True} for number in range(20_000)}
    },
    "inputs: x: 20000 parameters; send at most 100": {
        "inputs": [{"name": "x", "parameters": {f"k{number}": {"int64_param": 1} for number in range(20_000)}}]
    },
    "outputs: x: 20000 parameters; send at most 100": {
        "outputs": [{"name": "x", "parameters": {f"k{number}": {} for number in range(20_000)}}]
    },
}


@pytest.mark.parametrize("sentence", FLOODS)
def test_flood_of_fields_is_refused_before_objects_are_made(sentence: str) -> None:
    message, calls = ModelInferRequest(**FLOODS[sentence]), [0]
    with counted_calls(calls), pytest.raises(InvalidPayload, match=f"^{sentence}$"):
        messages.parse(message, _signature("FP32"))
    assert calls[-1] < 10_000, "most of them are pytest's"
