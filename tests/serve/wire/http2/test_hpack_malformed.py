"""Malformed header blocks: our decoder accepts what the hpack package and libnghttp2 accept, and refuses the rest."""

from __future__ import annotations

from random import Random

import hpack
import pytest

from serve.wire.http2.hpack import Decoder, Field, HpackError
from tests.quick import quick
from tests.serve.wire.http2 import nghttp2
from tests.serve.wire.http2.header_lists import header_lists

BLOCKS = 1500
LIST_BYTES = 1 << 24


class Decoders:
    """The three decoders of one connection."""

    def __init__(self) -> None:
        self.ours, self.oracle = Decoder(LIST_BYTES), hpack.Decoder(LIST_BYTES)
        library = nghttp2.load_library()
        self._nghttp2 = library and nghttp2.Decoder(library)

    def decode(self, block: bytes) -> list[Field] | None:
        """Return what all of them decode; None if all refuse the block."""
        try:
            fields = self.ours.decode(block)
        except HpackError:
            fields = None
        assert self.decode_with_hpack(block) == fields, block.hex()
        if self._nghttp2 is not None:
            assert self._nghttp2.decode(block) == fields, block.hex()
        if fields is not None:
            assert self.ours._table == self.oracle.header_table.dynamic_entries
        return fields

    def decode_with_hpack(self, block: bytes) -> list[Field] | None:
        try:
            return [(bytes(name), bytes(value)) for name, value in self.oracle.decode(block, raw=True)]
        except hpack.HPACKError:
            return None


@pytest.mark.parametrize(
    ("block", "named"),
    [
        ("80", "no field with index 0"),
        ("be", "no field with index 62"),
        ("ffffffffff7f", "an integer is larger"),
        ("ff80808080808001", "an integer is larger"),
        ("ff", "ends within an integer"),
        ("4003616263", "is truncated"),
        ("400361", "ends within a string"),
        ("40", "is truncated"),
        ("0003616263ff", "ends within an integer"),
        ("3fe21f", "a table of 4097 bytes"),
        ("8220", "before the first field"),
        ("0001618100", "within a code"),
        ("00016184ffffffff", "continues after its end"),
        ("00016182ffff", "within a code"),
    ],
)
def test_malformed_block_is_rejected(block: str, named: str) -> None:
    with pytest.raises(HpackError, match=named):
        Decoder(LIST_BYTES).decode(bytes.fromhex(block))
    assert Decoders().decode(bytes.fromhex(block)) is None


def test_integer_padded_to_six_bytes_is_rejected() -> None:
    """The only difference: RFC 7541, 5.1, requires a limit; hpack has none, and libnghttp2 one of 32 bits.

    No encoder pads integers, and those of 5 bytes are larger than any header list.
    """
    block = bytes.fromhex("0001617f8180808000") + b"x" * 128
    assert Decoders().decode_with_hpack(block) == [(b"a", b"x" * 128)]
    with pytest.raises(HpackError, match="an integer is larger"):
        Decoder(LIST_BYTES).decode(block)


def change(random: Random, block: bytes) -> bytes:
    """Change a few bytes, leave some out or add some; most changes are near the beginning of a field."""
    changed = bytearray(block)
    for _ in range(random.choice((1, 1, 2, 4))):
        place = random.randrange(len(changed) + 1)
        kind = random.randrange(5)
        if kind == 0:
            del changed[place:]
        elif kind == 1:
            del changed[place : place + random.choice((1, 2, 9))]
        elif kind == 2:
            changed[place:place] = random.randbytes(random.choice((1, 2, 9)))
        elif kind == 3:
            changed[place : place + 1] = random.choice((b"\x00", b"\x20", b"\x3f", b"\x7f", b"\x80", b"\xbe", b"\xff"))
        elif place < len(changed):
            changed[place] ^= 1 << random.randrange(8)
    return bytes(changed)


@pytest.mark.parametrize("seed", quick((0,), range(3)))
def test_changed_blocks_are_decoded_alike_or_refused(seed: int) -> None:
    random, refused = Random(seed), 0
    encoder, decoders = hpack.Encoder(), Decoders()
    for fields in header_lists(random, BLOCKS):
        block = bytes(encoder.encode(fields, huffman=random.random() < 0.5))
        if random.random() < 0.5:
            assert decoders.decode(block) == fields
            continue
        refused += decoders.decode(change(random, block)) is None
        encoder, decoders = hpack.Encoder(), Decoders()
    assert BLOCKS // 10 < refused < BLOCKS // 2


@pytest.mark.parametrize("seed", quick((0,), range(3)))
def test_random_bytes_are_decoded_alike_or_refused(seed: int) -> None:
    random = Random(seed)
    for _ in range(BLOCKS):
        decoders = Decoders()
        while decoders.decode(random.randbytes(random.choice((1, 2, 3, 5, 20)))) is not None:
            pass
