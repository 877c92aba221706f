"""HPACK compared with the hpack package and the standard's examples, and its limits."""

from __future__ import annotations

import hpack as oracle
import pytest
from hpack.table import HeaderTable
from hypothesis import given
from hypothesis import strategies as st

from serve.wire.http2 import hpack
from serve.wire.http2.hpack import Decoder, Field, HpackBomb, HpackError
from tests.serve.wire.http2.frames import FUZZ_SETTINGS, decode_fields

LIST_BYTES = 1 << 16
NAMES = st.one_of(
    st.sampled_from([name for name, _ in hpack.STATIC]),
    st.text("abcdefghijklmnopqrstuvwxyz-_0123456789", min_size=1, max_size=20).map(str.encode),
)
FIELDS = st.lists(st.tuples(NAMES, st.binary(max_size=200)), max_size=20)


def test_static_table_is_that_of_the_standard() -> None:
    assert tuple(HeaderTable.STATIC_TABLE) == hpack.STATIC


@FUZZ_SETTINGS
@given(fields=FIELDS)
def test_another_decoder_reads_our_blocks(fields: list[Field]) -> None:
    found = oracle.Decoder().decode(hpack.encode_status(200) + hpack.encode_literals(fields), raw=True)
    assert [tuple(one) for one in found] == [(b":status", b"200"), *fields]


@pytest.mark.parametrize("code", [200, 204, 400, 404, 405, 415, 431, 500, 505])
def test_every_status_is_encoded(code: int) -> None:
    assert decode_fields(hpack.encode_status(code)) == {b":status": b"%d" % code}


@FUZZ_SETTINGS
@given(data=st.binary(max_size=300))
def test_huffman_round_trip(data: bytes) -> None:
    encoder = oracle.huffman.HuffmanEncoder(
        oracle.huffman_constants.REQUEST_CODES, oracle.huffman_constants.REQUEST_CODES_LENGTH
    )
    assert hpack.huffman_decode(encoder.encode(data)) == data


# RFC 7541, C.4: three requests on one connection.
EXAMPLES = (
    ("828684418cf1e3c2e5f23a6ba0ab90f4ff", [(b":authority", b"www.example.com")]),
    ("828684be5886a8eb10649cbf", [(b":authority", b"www.example.com"), (b"cache-control", b"no-cache")]),
    (
        "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf",
        [(b":authority", b"www.example.com"), (b"custom-key", b"custom-value")],
    ),
)


def test_examples_of_the_standard() -> None:
    decoder = Decoder(LIST_BYTES)
    for block, wanted in EXAMPLES:
        found = decoder.decode(bytes.fromhex(block))
        assert found is not None
        assert found[3:] == wanted
    assert decoder.table_version == 3


def test_oversized_list_is_none_and_updates_the_table() -> None:
    encoder, decoder = oracle.Encoder(), Decoder(1000)
    assert decoder.decode(bytes(encoder.encode([(b"a", b"x" * 600), (b"b", b"y" * 600)]))) is None
    assert decoder.decode(bytes(encoder.encode([(b"b", b"y" * 600)]))) == [(b"b", b"y" * 600)]


def test_repeated_large_field_takes_no_memory() -> None:
    decoder = Decoder(LIST_BYTES)
    assert decoder.decode(b"\x40\x01a" + b"\x7f\xa1\x1e" + b"x" * 4000) is not None
    assert decoder.decode(b"\xbe" * 30) is None
    with pytest.raises(HpackBomb):
        decoder.decode(b"\xbe" * 16384)
    assert decoder.decoded_fields < 800, "a bomb is not decoded to its end"


def test_entry_larger_than_the_table_empties_it() -> None:
    decoder = Decoder(LIST_BYTES)
    decoder.decode(b"\x40\x01a\x01b")
    decoder.decode(b"\x40\x01a" + b"\x7f\x81\x7f" + b"x" * 16384)
    with pytest.raises(HpackError, match="index 62"):
        decoder.decode(b"\xbe")
