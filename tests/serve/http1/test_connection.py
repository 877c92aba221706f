from __future__ import annotations

import pytest

from tests.serve.http1.test_connection_more import ask, post


@pytest.mark.parametrize(
    ("framing", "body"),
    [("content-length: 5", b"hello"), ("transfer-encoding: chunked", b"2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n")],
)
def test_a_body_behind_an_upgrade_no_one_makes_is_read(framing: str, body: bytes) -> None:
    """Java's client asks for h2c with whatever it sends first."""
    head = f"POST /a HTTP/1.1\r\nhost: x\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n{framing}\r\n\r\n"
    for pieces in ([head.encode() + body], [head.encode(), body], [head.encode(), body[:1], body[1:]]):
        answer = ask(*pieces, post("/b", b"x", close=True))
        assert answer.index(b"POST /a 5") < answer.index(b"POST /b 1")


def test_trailers_without_an_end_are_refused_before_they_fill_the_memory() -> None:
    head = b"POST /a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\nx: "
    assert ask(head + b"a" * 600_000).startswith(b"HTTP/1.1 431 ")
