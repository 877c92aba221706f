"""The parts of the cluster suite and of its recipe in the docs, as far as they need no cluster."""

from __future__ import annotations

import http.client
import json
import re
import shlex
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from k8s.objects.manifests import check_pinned
from pipeline.contract.task import load_class
from pipeline.history import example_folder
from pipeline.system.sources import SOURCE_ROOT

from .images import NAME, PAUSE_SECONDS, image_name, make_bundle
from .tcp_proxy import TcpProxy

TEXT = "".join(path.read_text() for path in sorted((SOURCE_ROOT / "docs").glob("kubernetes*.md")))


def test_documented_files_and_targets_exist() -> None:
    body = yaml.safe_load((SOURCE_ROOT / "tests" / "cluster" / "kind.yaml").read_text())
    assert [node["role"] for node in body["nodes"]].count("worker") == 2
    assert "--config tests/cluster/kind.yaml" in TEXT
    assert "python -m tests.cluster.images" in TEXT
    makefile = (SOURCE_ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in re.findall(r"make (test-\w+)", TEXT))


def test_documented_request_is_valid_for_the_project() -> None:
    (line,) = [line for line in TEXT.splitlines() if line.startswith("curl ")]
    words = shlex.split(line)
    folder = example_folder("starter")
    codec = load_class("codec.py:Codec", folder)()
    assert codec.decode(json.loads(words[-1])["instances"])["features"].shape == (1, 13)


def test_bundles_are_the_same_wherever_they_are_written(tmp_path: Path) -> None:
    first, second = (
        {version: make_bundle(tmp_path / name / version, version) for version in PAUSE_SECONDS} for name in "ab"
    )
    assert [bundle.digest for bundle in first.values()] == [bundle.digest for bundle in second.values()]
    images = {image_name(NAME, bundle) for bundle in first.values()}
    assert len(images) == len(PAUSE_SECONDS)
    for image in images:
        check_pinned(image, "deploy.image")


class _Ok(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the overridden method's signature
        pass


def test_proxy_cuts_connections_and_comes_back() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Ok)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    proxy = TcpProxy("127.0.0.1", server.server_port)
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=10)

    def status() -> int:
        connection.request("GET", "/")
        response = connection.getresponse()
        response.read()
        return response.status

    try:
        assert status() == 204
        proxy.fail_for(0.5)
        with pytest.raises((OSError, http.client.HTTPException)):
            status()
        proxy.wait_until_up()
        connection.close()
        assert status() == 204
    finally:
        connection.close()
        proxy.close()
        server.shutdown()
        server.server_close()
