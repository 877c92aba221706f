"""An image registry over HTTP with the OCI distribution API, which can require logins, be busy or misbehave."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

TOKEN = "a-token-of-the-tests"


@dataclass
class RegistryServer:
    """The server: its content, the requests it got, and how it behaves."""

    auth: str = "none"  # none, basic or bearer
    user: tuple[str, str] = ("ann", "secret")
    busy: list[int] = field(default_factory=list)  # statuses of the first responses
    lie: str = ""  # a wrong digest that it reports for manifests
    realm: str = ""  # URL that issues tokens; empty: this server
    redirect: str = ""  # base URL to which requests for blobs are redirected
    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, tuple[str, bytes]] = field(default_factory=dict)  # by tag and digest
    requests: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, Authorization

    def start(self) -> RegistryServer:
        handler = type("Handler", (_Handler,), {"registry": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        return self

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self._server.server_address[1]}"

    @property
    def basic(self) -> str:
        return "Basic " + base64.b64encode(":".join(self.user).encode()).decode()

    def methods(self, what: str) -> list[str]:
        return [method for method, path, _ in self.requests if what in path]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    registry: RegistryServer

    def log_message(self, *_: Any) -> None:
        """Write no access log."""

    def do_HEAD(self) -> None:
        self._answer(b"")

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        self._answer(self._body())

    def do_PUT(self) -> None:
        self._answer(self._body())

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def _answer(self, body: bytes) -> None:
        registry, url = self.registry, urlsplit(self.path)
        given = self.headers.get("Authorization", "")
        registry.requests.append((self.command, self.path, given))
        if url.path == "/token":
            return self._token(given, body)
        if registry.busy:
            return self._send(registry.busy.pop(0), {"Retry-After": "0"})
        if challenge := self._challenge(given):
            return self._send(401, {"WWW-Authenticate": challenge}, _errors("UNAUTHORIZED", "who are you?"))
        if url.path == "/v2/":
            return self._send(200, {})
        kind = "manifests" if "/manifests/" in url.path else "blobs"
        getattr(self, f"_{kind}")(url.path.rpartition("/")[2], url.query, body)
        return None

    def _challenge(self, given: str) -> str:
        """Return a challenge unless the credentials suffice; a token for pulling does not allow pushing."""
        if self.registry.auth == "none" or (self.registry.auth == "basic" and given == self.registry.basic):
            return ""
        if self.registry.auth == "basic":
            return 'Basic realm="tests"'
        rights = "pull" if self.command in ("GET", "HEAD") else "pull,push"
        if given.startswith(f"Bearer {TOKEN}:{rights}"):
            return ""
        realm = self.registry.realm or f"http://{self.registry.host}/token"
        return f'Bearer realm="{realm}",service="tests",scope="repository:twice:{rights}"'

    def _token(self, given: str, body: bytes) -> None:
        query_and_form = {**parse_qs(urlsplit(self.path).query), **parse_qs(body.decode())}
        refreshed = query_and_form.get("refresh_token") == ["an-identity"]
        if given != self.registry.basic and not refreshed:
            return self._send(401, {}, _errors("DENIED", "wrong password"))
        return self._send(
            200, {}, json.dumps({"token": f"{TOKEN}:{query_and_form['scope'][0].rpartition(':')[2]}"}).encode()
        )

    def _manifests(self, name: str, _query: str, body: bytes) -> None:
        stored = self.registry.manifests
        if self.command == "PUT":
            digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
            stored[name] = stored[digest] = (self.headers["Content-Type"], body)
            return self._send(201, {"Docker-Content-Digest": self.registry.lie or digest})
        if name not in stored:
            return self._send(404, {}, _errors("MANIFEST_UNKNOWN", name))
        media_type, content = stored[name]
        return self._send(200, {"Content-Type": media_type}, content)

    def _blobs(self, name: str, query: str, body: bytes) -> None:
        stored = self.registry.blobs
        if self.command == "POST":
            return self._send(202, {"Location": "/v2/twice/blobs/uploads/1?state=open"})
        if self.command == "PUT":
            digest = parse_qs(query)["digest"][0]
            good = digest == f"sha256:{hashlib.sha256(body).hexdigest()}" and "state=open" in query
            stored.update({digest: body} if good else {})
            return self._send(201 if good else 400, {}, b"" if good else _errors("DIGEST_INVALID", digest))
        if name not in stored:
            return self._send(404, {})
        if self.registry.redirect:
            return self._send(307, {"Location": f"{self.registry.redirect}{self.path}"})
        return self._send(200, {}, stored[name])

    def _send(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _errors(code: str, message: str) -> bytes:
    return json.dumps({"errors": [{"code": code, "message": message}]}).encode()
