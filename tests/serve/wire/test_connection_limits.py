from __future__ import annotations

from typing import Any

import pytest

from serve.wire.connection_limits import PeerLimits, peer_address


def test_an_address_without_connections_takes_no_memory() -> None:
    limits = PeerLimits(2)
    for number in range(100):
        assert limits.admit(str(number))
        assert not limits.admit(str(number))
        limits.release(str(number))
    assert len(limits) == 0
    assert not limits._counts


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (("192.0.2.1", 5), ("192.0.2.1", 6), True),
        (("192.0.2.1", 5), ("192.0.2.2", 5), False),
        (("2001:db8::1", 5, 0, 0), ("2001:db8::ffff:2", 6, 0, 0), True),
        (("2001:db8::1", 5, 0, 0), ("2001:db8:0:1::1", 5, 0, 0), False),
        (("::ffff:192.0.2.1", 5, 0, 0), ("192.0.2.1", 7), True),
        (("fe80::1%eth0", 5, 0, 2), ("fe80::2%eth0", 5, 0, 2), True),
        (None, "", True),
        (None, ("192.0.2.1", 5), False),
    ],
)
def test_peers_are_counted_by_their_network(one: Any, other: Any, same: bool) -> None:
    assert (peer_address(one) == peer_address(other)) is same
