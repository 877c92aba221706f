from __future__ import annotations

import contextlib
import errno
import socket
import sys
from collections.abc import Callable, Iterator

import pytest

from pipeline.contract.errors import ResourceError
from serve.sockets import Address, accept_waiting, bind_socket, stop_accepting, take_over_port


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


def test_a_port_another_program_holds_is_refused_even_for_sharing(address: Address) -> None:
    with socket.socket() as stranger:
        stranger.bind((address.host, address.port))
        stranger.listen()
        for share in (False, True):
            with pytest.raises(ResourceError, match=f"port {address}: Address already in use; stop its process"):
                bind_socket(address, share=share)


def test_a_port_of_our_own_is_refused_unless_it_is_to_be_shared(address: Address) -> None:
    with bind_socket(address, share=False) as first:
        first.listen()
        with pytest.raises(ResourceError, match="already in use"):
            bind_socket(address, share=False)
        bind_socket(address, share=True).close()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems share ports by rules of their own")
def test_a_successor_gets_every_new_connection_and_the_first_keeps_its_queue(address: Address) -> None:
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


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such filter")
def test_a_closing_socket_keeps_its_queue_and_admits_no_one_else(address: Address) -> None:
    with bind_socket(address, share=False) as sock:
        sock.listen()
        with _connections(address, 3):
            stop_accepting(sock)
            with pytest.raises(TimeoutError):
                socket.create_connection((address.host, address.port), 0.1)
            assert _accepted(sock) == 3


def test_a_host_that_is_not_ours_is_one_clear_sentence() -> None:
    with pytest.raises(ResourceError, match=r"192\.0\.2\.1:8080"):
        bind_socket(Address("192.0.2.1", 8080), share=False)


def test_an_ipv6_address_is_written_in_brackets() -> None:
    assert Address("::1", 8080).url == "http://[::1]:8080"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such filter")
@pytest.mark.parametrize(("number", "level"), [(errno.EPERM, "INFO"), (errno.ENOMEM, "WARNING")])
def test_a_container_without_capabilities_is_not_warned_of_what_it_may_not_do(
    number: int, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing(socket.socket):
        def setsockopt(self, *_: object) -> None:
            raise OSError(number, "no")

    with caplog.at_level("INFO"), Refusing() as sock:
        stop_accepting(sock)
    assert [(record.levelname, "takes no socket filter" in record.message) for record in caplog.records] == [
        (level, True)
    ]


def test_connections_in_the_queue_are_accepted_at_once(address: Address) -> None:
    with contextlib.closing(bind_socket(address, share=False)) as sock:
        sock.listen()
        with _connections(address, 3):
            waiting = accept_waiting(sock)
            assert len(waiting) == 3
            assert accept_waiting(sock) == []
        for client in waiting:
            client.close()
