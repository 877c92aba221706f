"""Header blocks of other encoders: hundreds on a connection decode to the fields that were encoded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import grpc
import hpack
import pytest

from serve.grpc import messages
from serve.wire.http2 import headers
from serve.wire.http2.hpack import STATIC, Decoder, Field
from serve.wire.http2.stream import Stream
from serve.wire.http2.streams import Streams
from tests.quick import quick
from tests.serve.wire.http2 import nghttp2
from tests.serve.wire.http2.frames import EchoApplication
from tests.serve.wire.http2.header_lists import SECRET, header_lists
from tests.serve.wire.http2.listener import RunningListener, start_listener

BLOCKS = 400
TABLE_SIZES = (0, 40, 300, 1000, 4096)
LIST_BYTES = 1 << 20
Blocks = Iterator[tuple[list[Field], bytes]]  # what was encoded, and the block


def encode_with_hpack(random: Random) -> Blocks:
    encoder = hpack.Encoder()
    for fields in header_lists(random, BLOCKS):
        if random.random() < 0.05:
            for size in random.sample(TABLE_SIZES, random.choice((1, 2))):
                encoder.header_table_size = size
        marked = [(*field, field[0] == SECRET) for field in fields]
        yield fields, bytes(encoder.encode(marked, huffman=random.random() < 0.5))


def encode_with_nghttp2(random: Random) -> Blocks:
    if (library := nghttp2.load_library()) is None:
        pytest.skip("libnghttp2 is not installed")
    encoder = nghttp2.Encoder(library)
    for fields in header_lists(random, BLOCKS):
        if random.random() < 0.05:
            for size in random.sample(TABLE_SIZES, random.choice((1, 2))):
                encoder.resize(size)
        yield fields, encoder.encode(fields, frozenset((SECRET,)))


class RandomEncoder:
    """Chooses any representation that is valid, for each field and string."""

    def __init__(self, random: Random) -> None:
        self._random, self._encoder = random, hpack.Encoder()

    def encode(self, fields: list[Field]) -> bytes:
        block = bytearray()
        while self._random.random() < 0.1:
            size = self._random.choice(TABLE_SIZES)
            self._encoder.header_table.maxsize = size
            block += self._integer(0x20, 5, size)
        for field in fields:
            block += self._encode_field(field)
        return bytes(block)

    def _encode_field(self, field: Field) -> bytes:
        entries = [*STATIC, *self._encoder.header_table.dynamic_entries]
        equal = [index for index, other in enumerate(entries, 1) if other == field]
        if equal and self._random.random() < 0.7:
            return self._integer(0x80, 7, self._random.choice(equal))
        names = [index for index, other in enumerate(entries, 1) if other[0] == field[0]]
        index = self._random.choice(names) if names and self._random.random() < 0.7 else 0
        mode, bits = self._random.choice(((0x40, 6), (0x40, 6), (0x00, 4), (0x10, 4)))
        if mode == 0x40:
            self._encoder.header_table.add(*field)
        name = b"" if index else self._string(field[0])
        return self._integer(mode, bits, index) + name + self._string(field[1])

    def _string(self, value: bytes) -> bytes:
        huffman = self._random.random() < 0.5
        value = self._encoder.huffman_coder.encode(value) if huffman else value
        return self._integer(huffman << 7, 7, len(value)) + value

    def _integer(self, mode: int, bits: int, value: int) -> bytes:
        encoded = hpack.hpack.encode_integer(value, bits)
        encoded[0] |= mode
        return bytes(encoded)


def encode_at_random(random: Random) -> Blocks:
    encoder = RandomEncoder(random)
    for fields in header_lists(random, BLOCKS):
        yield fields, encoder.encode(fields)


@pytest.mark.parametrize("seed", quick((0,), range(3)))
@pytest.mark.parametrize("encode", [encode_with_hpack, encode_with_nghttp2, encode_at_random])
def test_blocks_of_a_connection_are_decoded(encode: Callable[[Random], Blocks], seed: int) -> None:
    decoder, oracle, evictions = Decoder(LIST_BYTES), hpack.Decoder(LIST_BYTES), 0
    for fields, block in encode(Random(seed)):
        before = decoder.table_version - len(decoder._table)
        assert decoder.decode(block) == fields
        assert [tuple(field) for field in oracle.decode(block, raw=True)] == fields
        assert decoder._table == oracle.header_table.dynamic_entries
        evictions += decoder.table_version - len(decoder._table) - before
    assert evictions > BLOCKS


class GrpcEchoApplication(EchoApplication):
    """Answers with the same message, in headers that gRPC clients accept."""

    def answer(self, streams: Streams, stream: Stream) -> None:
        streams.answer(stream, messages.ANSWER, b"".join(stream.parts), messages.OK)


def call_with_metadata(channel: Any, fields: list[Field]) -> None:
    """Call the path of a header list, with its fields as far as calls may have them."""
    path = dict(fields)[b":path"].decode()
    metadata: list[tuple[str, str | bytes]] = [
        (f"{name.decode()}-bin", value) for name, value in fields if name.startswith(b"x-") and len(value) < 2000
    ]
    metadata += [(name.decode(), value.decode()) for name, value in fields if name == SECRET]
    call = channel.unary_unary(path, lambda message: message, lambda message: message)
    assert call(b"hello", metadata=metadata, timeout=60) == b"hello"


def test_blocks_of_grpc_clients_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[tuple[bytes, list[Field] | None]] = []

    class RecordingDecoder(Decoder):
        def decode(self, block: bytes) -> list[Field] | None:
            fields = super().decode(block)
            received.append((block, fields))
            return fields

    monkeypatch.setattr(headers, "Decoder", RecordingDecoder)
    sent = list(header_lists(Random(0), BLOCKS // 2))

    def call(port: RunningListener) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel("{}:{}".format(*port.place), options) as channel:
            for fields in sent:
                call_with_metadata(channel, fields)

    with start_listener(GrpcEchoApplication()) as run:
        run(lambda port: asyncio.to_thread(call, port))
    oracle = hpack.Decoder()
    assert len(received) > len(sent) // 2, "equal blocks are decoded once"
    for block, fields in received:
        assert [tuple(field) for field in oracle.decode(block, raw=True)] == fields
    assert any(block[0] > 0x80 + len(STATIC) for block, _ in received), "indexed fields of the table are used"
