"""A TCP proxy in front of an API server, which can cut all connections and refuse new ones for a while."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from pathlib import Path
from urllib.parse import urlsplit

import yaml

_BUFFER_BYTES = 1 << 16


class TcpProxy:
    def __init__(self, host: str, port: int) -> None:
        self._target = host, port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.outages = 0
        self._up, self._closing = threading.Event(), threading.Event()
        self._up.set()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def fail_for(self, seconds: float) -> None:
        """Cut everything now and come back later; return at once."""
        self._up.clear()
        self.outages += 1
        self._cut()
        thread = threading.Thread(target=self._come_back, args=(seconds,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def wait_until_up(self) -> None:
        self._up.wait()

    def close(self) -> None:
        self._closing.set()
        self._up.set()
        self._cut()
        for thread in self._threads:
            thread.join(30)
        self._listener.close()

    def _come_back(self, seconds: float) -> None:
        self._closing.wait(seconds)
        self._up.set()

    def _cut(self) -> None:
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        self._listener.settimeout(0.2)
        while not self._closing.is_set():
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            if not self._up.is_set():
                client.close()  # the client sees a cut connection, as from a load balancer without a server
                continue
            thread = threading.Thread(target=self._forward, args=(client,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _forward(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client, socket.create_connection(self._target, timeout=10) as server:
            pair = {client: server, server: client}
            with self._lock:
                self._connections |= pair.keys()
            try:
                self._copy(pair)
            finally:
                with self._lock:
                    self._connections -= pair.keys()

    @staticmethod
    def _copy(pair: dict[socket.socket, socket.socket]) -> None:
        while True:
            for ready in select.select(list(pair), [], [])[0]:
                data = ready.recv(_BUFFER_BYTES)
                if not data:
                    return
                pair[ready].sendall(data)


def write_proxied_kubeconfig(kubeconfig: Path, target: Path) -> TcpProxy:
    """Write a kubeconfig whose current cluster is reached through a new proxy; certificates are still checked."""
    body = yaml.safe_load(kubeconfig.read_text())
    context = next(item for item in body["contexts"] if item["name"] == body["current-context"])
    cluster = next(item for item in body["clusters"] if item["name"] == context["context"]["cluster"])["cluster"]
    server = urlsplit(cluster["server"])
    assert server.hostname
    proxy = TcpProxy(server.hostname, server.port or 443)
    cluster["server"] = f"{server.scheme}://127.0.0.1:{proxy.port}"
    cluster.setdefault("tls-server-name", server.hostname)
    target.write_text(yaml.safe_dump(body))
    return proxy
