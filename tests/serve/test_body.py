from __future__ import annotations

import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.serve.conftest import Running


HEAD = "POST /v1/models/tiny:predict HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def _send(server: Running, *parts: bytes) -> bytes:
    """Everything the service answers to these bytes until it closes."""
    with socket.create_connection(("127.0.0.1", server.port), 20) as sock:
        for part in parts:
            sock.sendall(part)
        answer = b""
        while chunk := sock.recv(4096):
            answer += chunk
        return answer


def test_a_body_said_to_be_too_large_is_refused_before_it_is_sent(server: Running) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 20) as sock:
        sock.sendall(f"{HEAD}content-length: 1000000000000\r\n\r\n".encode())
        answer = b""
        while not answer.endswith(b"}"):
            chunk = sock.recv(4096)
            assert chunk, answer
            answer += chunk
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer
    assert answer.endswith(b'{"error":"body: larger than the limit of 100000 bytes"}')


def test_a_body_of_unsaid_size_is_refused_where_it_passes_the_limit(server: Running) -> None:
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    head = f"{HEAD}connection: close\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    answer = _send(server, head, chunk, chunk, b"0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413 ")


def test_a_client_that_waits_for_leave_to_send_is_refused_without_it(server: Running) -> None:
    answer = _send(server, f"{HEAD}content-length: 200000\r\nexpect: 100-continue\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"100 Continue" not in answer


def test_a_client_that_hangs_up_in_the_middle_of_its_body_harms_nobody(server: Running) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 20) as sock:
        sock.sendall(f"{HEAD}content-length: 1000\r\n\r\n[".encode())
    answer = _send(server, b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert "Traceback" not in server.log
