"""The HTTP server of the test API server: one thread for each connection, chunked streams."""

from __future__ import annotations

import contextlib
import io
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol


class Answers(Protocol):
    def answer(self, method: str, target: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], Any]: ...  # fmt: skip  # noqa: E501


class Edge:
    def __init__(self, server: ThreadingHTTPServer) -> None:
        self._server = server
        self._thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve_http(answers: Answers) -> Edge:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"answers": answers}))
    server.daemon_threads = True  # those of connections that clients keep open
    return Edge(server)


class _Handler(BaseHTTPRequestHandler):
    answers: Answers
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # a response is sent in one piece
    disable_nagle_algorithm = True

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        try:
            status, extra, answer = self.answers.answer(self.command, self.path, headers, body)
            self.send_response(status)
            self._stream(extra, answer) if isinstance(answer, Iterator) else self._whole(extra, answer)
            self.wfile.flush()
        except ConnectionAbortedError:
            self._cut()
        except (BrokenPipeError, ConnectionResetError):  # the client went away
            self._forget()

    def _cut(self) -> None:
        """Send what was written so far, then cut the connection."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.wfile.flush()
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self._forget()

    def _forget(self) -> None:
        self.close_connection = True
        self.wfile = io.BytesIO()  # the rest is discarded

    def _whole(self, extra: dict[str, str], answer: Any) -> None:
        data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        self._head({"Content-Length": str(len(data)), **extra})
        self.wfile.write(data)

    def _stream(self, extra: dict[str, str], parts: Iterator[bytes]) -> None:
        self._head({"Transfer-Encoding": "chunked", **extra})
        self.wfile.flush()  # the first part may come late
        for part in parts:
            self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")
        self.wfile.flush()

    def _head(self, headers: dict[str, str]) -> None:
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = _handle  # noqa: N815 - names the standard library looks up

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the overridden method's signature
        """Write no access log."""
