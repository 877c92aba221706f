"""Header lists of a connection's requests, from a seed: most fields repeat, some fill or exceed the HPACK table."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from serve.wire.http2.hpack import STATIC, Field

SECRET = b"authorization"
_CHARACTERS = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:/ %"
_COMMON: tuple[Field, ...] = (
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
    (b"user-agent", b"grpc-python/1.80 grpc-c/40"),
    (b"grpc-accept-encoding", b"identity, deflate, gzip"),
    (b"x-empty", b""),
)
_SIZES = (
    0,
    1,
    8,
    30,
    126,
    127,
    128,
    300,
    1500,
    4064,
    4097,
    9000,
)  # around the prefixes of integers and the table's size
_SIZE_WEIGHTS = (4, 8, 20, 40, 4, 4, 4, 8, 4, 1, 1, 1)


def header_lists(random: Random, count: int) -> Iterator[list[Field]]:
    for number in range(count):
        fields: list[Field] = [
            (b":method", b"POST"),
            (b":scheme", random.choice((b"http", b"https"))),
            (b":path", b"/package.Service/Method%d" % random.randrange(12)),
            (b":authority", b"host-%d:9000" % random.randrange(3)),
            *random.sample(_COMMON, random.randrange(len(_COMMON))),
        ]
        if random.random() < 0.5:
            fields.append((SECRET, b"Bearer %d" % random.randrange(5)))
        if random.random() < 0.5:
            fields.append((b"grpc-timeout", b"%dm" % random.randrange(99_999)))
        if random.random() < 0.7:
            fields.append((b"x-request-id", b"%d-%d" % (number, random.getrandbits(64))))
        fields += [_random_field(random) for _ in range(random.choice((0, 0, 1, 2, 6)))]
        yield fields


def _random_field(random: Random) -> Field:
    (size,) = random.choices(_SIZES, _SIZE_WEIGHTS)
    value = random.randbytes(size) if random.random() < 0.3 else bytes(random.choices(_CHARACTERS, k=size))
    if random.random() < 0.3:
        return random.choice(STATIC)[0], value
    return b"x-" + bytes(random.choices(b"abcdefgh", k=random.choice((1, 1, 2, 20)))), value
