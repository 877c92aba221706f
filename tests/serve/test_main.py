from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from pipeline.contract.bundle import open_bundle

if TYPE_CHECKING:
    from tests.serve.conftest import Launcher


ROOT = Path(__file__).resolve().parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}


def _refusal(bundle: Path, *options: str) -> str:
    """Return the error of a service that ends with exit code 2 before it listens."""
    argv = [sys.executable, "-m", "serve", str(bundle), "--grpc-port", "-1", "--log-format", "text", *options]
    done = subprocess.run(argv, env=ENV, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 2, done.stderr
    assert "ready url" not in done.stderr
    (error,) = [line for line in done.stderr.splitlines() if not line.startswith("20")]  # the rest are dated log lines
    assert error.startswith("error: ")
    return error


@pytest.fixture
def port(free_ports: Callable[[int], list[int]]) -> str:
    return str(free_ports(1)[0])


def test_a_tampered_bundle_is_refused_in_one_line(own_bundle: Path, port: str) -> None:
    model = own_bundle / "model.onnx"
    content = bytearray(model.read_bytes())
    content[-20] ^= 1
    model.write_bytes(content)
    assert "model.onnx: content changed since export" in _refusal(own_bundle, "--port", port)


@pytest.mark.parametrize("over", ["http", "grpc"])
def test_a_port_in_use_is_refused_in_one_line(
    over: str, bundle_path: Path, port: str, free_ports: Callable[[int], list[int]]
) -> None:
    options = ["--port"] if over == "http" else ["--port", str(free_ports(1)[0]), "--grpc-port"]
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", int(port)))
        stranger.listen()
        assert f"port 127.0.0.1:{port}: Address already in use" in _refusal(bundle_path, *options, port)


def test_folder_that_is_no_bundle_is_refused_in_one_line(tmp_path: Path, port: str) -> None:
    assert "not a bundle (no manifest.json)" in _refusal(tmp_path, "--port", port)


def test_a_service_states_where_it_listens_and_what_it_serves(own_bundle: Path, start: Launcher) -> None:
    short = open_bundle(own_bundle).digest[:12]
    running = start(own_bundle)
    assert running.stop() == 0
    assert open_bundle(own_bundle).digest.startswith(short), "the service leaves no trace in its bundle"
    received = [line.split(" ", 3)[3].split()[0] for line in running.lines]
    assert received == ["starting", "ready", "draining", "stopped"]
    assert all(f"bundle={short}" in line for line in running.lines)
    assert f"url={running.url} grpc=127.0.0.1:{running.grpc_port}" in running.lines[1]


def test_several_models_and_versions_are_served_by_one_process(
    start: Launcher, bundle_path: Path, other_path: Path, tricky_path: Path
) -> None:
    """Of two bundles with one name the last one gets all requests, or the canary's share."""
    options = (f"digits={other_path}", f"tricky={tricky_path}", "--canary", "50%", "--shadow", f"digits={bundle_path}")
    running = start(Path(f"digits={bundle_path}"), options=options)
    old, new = open_bundle(bundle_path), open_bundle(other_path)
    golden = {"instances": old.golden().instances}
    with httpx.Client(base_url=running.url, timeout=60) as client:
        assert client.get("/v2/models").json()["models"] == ["digits", "tricky"]
        assert client.get("/v2/models/digits").json()["versions"] == ["1", "2"]
        assert client.get("/v2/health/ready").json()["ready"]
        found = {client.post("/v1/models/digits:predict", json=golden).headers["x-bundle-digest"] for _ in range(40)}
        assert found == {old.digest, new.digest}
        for version, bundle in ((1, old), (2, new)):
            answer = client.post(f"/v1/models/digits/versions/{version}:predict", json=golden)
            assert answer.headers["x-bundle-digest"] == bundle.digest
        assert client.get("/v2/models/tricky").json()["versions"] == ["1"]


def _check(*bundles: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "serve", *map(str, bundles), "--check", "--log-format", "text"]
    return subprocess.run(argv, env=ENV, capture_output=True, text=True, check=False, timeout=300)


def test_check_loads_the_bundles_and_exits_without_listening(bundle_path: Path, tricky_path: Path) -> None:
    done = _check(Path(f"digits={bundle_path}"), Path(f"tricky={tricky_path}"))
    assert done.returncode == 0, done.stderr
    digests = ",".join(open_bundle(path).digest[:12] for path in (bundle_path, tricky_path))
    assert done.stdout == f"ok: golden requests answered: model=digits,tricky bundle={digests}\n"


def test_check_fails_with_a_wrong_golden_answer(own_bundle: Path, seal: Callable[[Path], str], port: str) -> None:
    golden = json.loads((own_bundle / "golden.json").read_text())
    golden["predictions"][0]["digit"] = 99
    (own_bundle / "golden.json").write_text(json.dumps(golden))
    seal(own_bundle)
    done = _check(own_bundle)
    assert (done.returncode, done.stdout) == (2, "")
    for output in (done.stderr, _refusal(own_bundle, "--port", port)):
        assert "golden requests: predictions[0].digit: expected 99" in output


def test_shadow_of_an_unknown_model_stops_the_start(bundle_path: Path, port: str) -> None:
    output = _refusal(bundle_path, "--port", port, "--shadow", f"big={bundle_path}")
    assert "which model? Write NAME=BUNDLE with one of tiny" in output
