from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pipeline.system.errors import ResourceError
from serve.process.sockets import Address, bind_socket, take_over_port
from serve.wire.accepting import close_listener


@pytest.fixture
def address(free_ports: Callable[[int], list[int]]) -> Address:
    return Address("127.0.0.1", free_ports(1)[0])


def _accepted(sock: socket.socket) -> int:
    with contextlib.ExitStack() as stack:
        for count in range(1000):
            try:
                stack.enter_context(sock.accept()[0])
            except BlockingIOError:
                return count
    raise AssertionError("a thousand connections no one made")


@contextlib.contextmanager
def _connections(address: Address, count: int) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(socket.create_connection((address.host, address.port), 5))
        yield


def test_port_of_another_program_is_refused_even_for_sharing(address: Address) -> None:
    with socket.socket() as stranger:
        stranger.bind((address.host, address.port))
        stranger.listen()
        for share in (False, True):
            with pytest.raises(ResourceError, match=f"port {address}: Address already in use; stop its process"):
                bind_socket(address, share=share)


def test_own_port_is_refused_unless_it_is_shared(address: Address) -> None:
    with bind_socket(address, share=False) as first:
        first.listen()
        with pytest.raises(ResourceError, match="already in use"):
            bind_socket(address, share=False)
        bind_socket(address, share=True).close()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems share ports by rules of their own")
def test_successor_gets_new_connections_and_the_first_keeps_its_queue(address: Address) -> None:
    with bind_socket(address, share=False) as first, bind_socket(address, share=True) as second:
        first.listen()
        with _connections(address, 5):
            second.listen()
            take_over_port(second)
            with _connections(address, 20):
                assert (_accepted(first), _accepted(second)) == (5, 20)
        first.close()
        with _connections(address, 20):
            assert _accepted(second) == 20


@pytest.fixture(params=["127.0.0.1", "::1"])
def listening(request: pytest.FixtureRequest, free_ports: Callable[[int], list[int]]) -> Iterator[socket.socket]:
    """A listening socket in a container that may not attach a filter."""
    address = Address(request.param, free_ports(1)[0])
    try:
        bound = bind_socket(address, share=False)
    except ResourceError:
        pytest.skip(f"no {request.param} here")
    with Unprivileged(fileno=bound.detach()) as sock:
        sock.setblocking(False)
        sock.listen()
        yield sock


class Unprivileged(socket.socket):
    def setsockopt(self, level: int, option: int, *value: Any) -> None:
        if level == socket.SOL_SOCKET:
            raise OSError(errno.EPERM, "Operation not permitted")
        super().setsockopt(level, option, *value)


def set_hops(sock: socket.socket, hops: int) -> None:
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_UNICAST_HOPS, hops)
    else:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, hops)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot ignore handshakes")
def test_closing_listener_returns_its_queue_and_ignores_new_handshakes(listening: socket.socket) -> None:
    address = Address(*listening.getsockname()[:2])

    async def close() -> list[socket.socket]:
        closing = asyncio.create_task(close_listener(listening))
        await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            socket.create_connection((address.host, address.port), 0.05)
        set_hops(late, 255)  # its handshake is completed, like one that had begun before
        late.connect((address.host, address.port))
        return await closing

    with socket.socket(listening.family) as late, _connections(address, 3):
        accepted = asyncio.run(close())
        set_hops(late, 64)
        late.sendall(b"request")
        assert len(accepted) == 4
        accepted[-1].settimeout(60)
        assert accepted[-1].recv(100) == b"request", "only handshakes are ignored"
        for client in accepted:
            client.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address.host, address.port), 5)


def test_foreign_host_is_named_in_the_error() -> None:
    with pytest.raises(ResourceError, match=r"192\.0\.2\.1:8080"):
        bind_socket(Address("192.0.2.1", 8080), share=False)


def test_an_ipv6_address_is_written_in_brackets() -> None:
    assert str(Address("::1", 8080)) == "[::1]:8080"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems share ports by rules of their own")
@pytest.mark.parametrize(("number", "level"), [(errno.EPERM, "INFO"), (errno.ENOMEM, "WARNING")])
def test_container_without_capabilities_logs_no_warning(
    number: int, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing(socket.socket):
        def setsockopt(self, *_: object) -> None:
            raise OSError(number, "no")

    with caplog.at_level("INFO"), Refusing() as sock:
        take_over_port(sock)
    assert [(record.levelname, "predecessor gets some" in record.message) for record in caplog.records] == [
        (level, True)
    ]
