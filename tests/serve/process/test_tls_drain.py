"""TLS and the end of the service: what was accepted is answered, encrypted or not."""

from __future__ import annotations

import http.client
import json
import signal
import ssl
import threading
from pathlib import Path

from serve.security import CertificatePair
from tests.serve import certificates
from tests.serve.conftest import Launcher


class Client(threading.Thread):
    """Sends requests to without a pause until it is notified that the connection closes."""

    def __init__(self, port: int, pair: CertificatePair, body: str) -> None:
        super().__init__()
        self._port, self._body = port, body
        self._context = ssl.create_default_context(cafile=str(pair.certificate))
        self.answers, self.under_way = 0, threading.Event()
        self.error: Exception | None = None

    def run(self) -> None:
        connection = http.client.HTTPSConnection("localhost", self._port, timeout=60, context=self._context)
        try:
            while True:
                connection.request("POST", "/v1/models/tiny:predict", self._body)
                answer = connection.getresponse()
                answer.read()
                assert answer.status == 200
                self.answers += 1
                self.under_way.set()
                if answer.headers["connection"] == "close":
                    return
        except (OSError, http.client.HTTPException, AssertionError) as error:
            self.error = error
        finally:
            connection.close()


def test_no_request_over_tls_is_lost_at_the_end(
    start: Launcher, bundle_path: Path, tmp_path: Path, picture: list[list[int]]
) -> None:
    pair = certificates.make(tmp_path, "localhost")
    running = start(bundle_path, options=["--tls-certificate", str(pair.certificate), "--tls-key", str(pair.key)])
    clients = [Client(running.port, pair, json.dumps({"instances": [picture]})) for _ in range(6)]
    for client in clients:
        client.start()
    for client in clients:
        assert client.under_way.wait(300), client.error
    running.signal(signal.SIGTERM)
    for client in clients:
        client.join(300)
    assert [client.error for client in clients] == [None] * len(clients)
    assert running.process.wait(300) == 0
