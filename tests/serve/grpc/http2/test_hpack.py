"""Our decoder against another implementation's encoder, and against what no encoder makes."""

from __future__ import annotations

import hpack as oracle
import pytest
from hpack.table import HeaderTable
from hypothesis import given
from hypothesis import strategies as st

from serve.grpc.http2 import hpack
from serve.grpc.http2.hpack import Decoder, Field, HpackError

from ...wire import RANDOM, fields_of

LIST_BYTES = 1 << 16
NAMES = st.one_of(
    st.sampled_from([name for name, _ in hpack.STATIC]),
    st.text("abcdefghijklmnopqrstuvwxyz-_0123456789", min_size=1, max_size=20).map(str.encode),
)
FIELDS = st.lists(st.tuples(NAMES, st.binary(max_size=200)), max_size=20)


def encoded(encoder: oracle.Encoder, fields: list[Field], *, huffman: bool = True) -> bytes:
    return bytes(encoder.encode(fields, huffman=huffman))


def test_the_static_table_is_the_standards() -> None:
    assert tuple(HeaderTable.STATIC_TABLE) == hpack.STATIC


@RANDOM
@given(blocks=st.lists(st.tuples(FIELDS, st.booleans(), st.sampled_from([None, 0, 64, 300, 4096])), max_size=6))
def test_what_another_encoder_says_is_understood(blocks: list[tuple[list[Field], bool, int | None]]) -> None:
    encoder, decoder = oracle.Encoder(), Decoder(LIST_BYTES)
    for fields, squeezed, size in blocks:
        if size is not None:
            encoder.header_table_size = size
        assert decoder.decode(encoded(encoder, fields, huffman=squeezed)) == fields


@RANDOM
@given(fields=FIELDS)
def test_what_we_say_is_understood_by_another_decoder(fields: list[Field]) -> None:
    found = oracle.Decoder().decode(hpack.status(200) + hpack.literals(fields), raw=True)
    assert [tuple(one) for one in found] == [(b":status", b"200"), *fields]


@pytest.mark.parametrize("code", [200, 204, 400, 404, 405, 415, 431, 500, 505])
def test_every_status_can_be_said(code: int) -> None:
    assert fields_of(hpack.status(code)) == {b":status": b"%d" % code}


@RANDOM
@given(data=st.binary(max_size=300))
def test_every_text_survives_the_huffman_code(data: bytes) -> None:
    encoder = oracle.huffman.HuffmanEncoder(
        oracle.huffman_constants.REQUEST_CODES, oracle.huffman_constants.REQUEST_CODES_LENGTH
    )
    assert hpack.decode(encoder.encode(data)) == data


# RFC 7541, C.4 and C.6.1: three requests on one connection, and an answer's date.
EXAMPLES = (
    ("828684418cf1e3c2e5f23a6ba0ab90f4ff", [(b":authority", b"www.example.com")]),
    ("828684be5886a8eb10649cbf", [(b":authority", b"www.example.com"), (b"cache-control", b"no-cache")]),
    (
        "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf",
        [(b":authority", b"www.example.com"), (b"custom-key", b"custom-value")],
    ),
)


def test_the_examples_of_the_standard_are_read_in_their_order() -> None:
    decoder = Decoder(LIST_BYTES)
    for block, wanted in EXAMPLES:
        found = decoder.decode(bytes.fromhex(block))
        assert found is not None
        assert found[3:] == wanted
    assert decoder.changes == 3


@pytest.mark.parametrize(
    ("block", "named"),
    [
        ("80", "no field has the index 0"),
        ("be", "no field has the index 62"),
        ("ffffffffff7f", "larger than any"),
        ("ff80808080808001", "larger than any"),
        ("ff", "ends in the middle of a number"),
        ("4003616263", "ends too early"),
        ("400361", "ends in the middle of a text"),
        ("40", "ends too early"),
        ("0003616263ff", "ends in the middle of a number"),
        ("3fe21f", "a table of 4097 bytes"),
        ("8220", "resized behind a field"),
        ("0001618100", "in the middle of a letter"),
        ("00016184ffffffff", "goes on behind its end"),
        ("00016182ffff", "in the middle of a letter"),
    ],
)
def test_a_block_that_is_none_is_refused(block: str, named: str) -> None:
    with pytest.raises(HpackError, match=named):
        Decoder(LIST_BYTES).decode(bytes.fromhex(block))


@RANDOM
@given(block=st.binary(max_size=200))
def test_any_bytes_are_decoded_or_refused(block: bytes) -> None:
    decoder = Decoder(LIST_BYTES)
    for _ in range(2):
        try:
            decoder.decode(block)
        except HpackError:
            return


def test_a_list_that_is_too_long_is_none_and_leaves_the_table_right() -> None:
    encoder, decoder = oracle.Encoder(), Decoder(1000)
    assert decoder.decode(encoded(encoder, [(b"a", b"x" * 600), (b"b", b"y" * 600)])) is None
    assert decoder.decode(encoded(encoder, [(b"b", b"y" * 600)])) == [(b"b", b"y" * 600)]


def test_one_large_field_said_a_thousand_times_takes_no_room() -> None:
    decoder = Decoder(LIST_BYTES)
    assert decoder.decode(b"\x40\x01a" + b"\x7f\xa1\x1e" + b"x" * 4000) is not None
    assert decoder.decode(b"\xbe" * 16384) is None


def test_an_entry_larger_than_the_table_empties_it() -> None:
    decoder = Decoder(LIST_BYTES)
    decoder.decode(b"\x40\x01a\x01b")
    decoder.decode(b"\x40\x01a" + b"\x7f\x81\x7f" + b"x" * 16384)
    with pytest.raises(HpackError, match="index 62"):
        decoder.decode(b"\xbe")
