"""Security of the service: forbidden calls in its source, and attacks on a running one."""

from __future__ import annotations

import ast
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.service.process import send_request
from pipeline.system.sources import SOURCE_ROOT
from tests.serve.bundles import TOO_BRIGHT

from .conftest import Running

SOURCES = sorted((SOURCE_ROOT / "serve").rglob("*.py"))
OWN_PROCESSES = SOURCE_ROOT / "serve/process/workers.py"  # it pickles what it sends to its own forks
UNPICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
CALLS = {"eval", "exec", "compile", "__import__"}


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def _called(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            yield ("" if isinstance(node.func, ast.Name) else ".") + name, node


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(SOURCE_ROOT).as_posix())
def test_source_neither_unpickles_nor_evaluates_text(path: Path) -> None:
    tree = ast.parse(path.read_bytes())
    assert not UNPICKLERS & set(_imported(tree)) or path == OWN_PROCESSES
    for name, call in _called(tree):
        assert name not in CALLS
        if name == ".load" and isinstance(call.func, ast.Attribute) and getattr(call.func.value, "id", "") == "np":
            assert [word.value.value for word in call.keywords if word.arg == "allow_pickle"] == [False]  # type: ignore[attr-defined]
        assert not any(word.arg == "shell" for word in call.keywords)


@pytest.mark.parametrize("path", sorted((SOURCE_ROOT / "serve").rglob("*.py")), ids=lambda path: path.name)
def test_service_has_no_http_client(path: Path) -> None:
    """So no URL from a request can be fetched."""
    tree = ast.parse(path.read_bytes())
    assert not {"httpx", "requests", "urllib3", "aiohttp", "ftplib", "smtplib", "subprocess"} & set(_imported(tree))
    names = {name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in [node.module]}
    assert not {"urllib.request", "http.client"} & names


NAMES = [
    "..",
    "%2e%2e",
    "..%2f..%2fetc",
    "a%2fb",
    "-x",
    ".hidden",
    "a b",
    "a%00b",
    "%c3%a9",
    "a" * 129,
    "a%0d%0ab:c",
    "a;b",
]


@pytest.mark.parametrize("name", NAMES)
def test_invalid_model_name_is_not_found(server: Running, name: str) -> None:
    for path in (f"/v2/models/{name}/ready", f"/v1/models/{name}", f"/v2/models/tiny/versions/{name}/ready"):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.putrequest("GET", path.replace(" ", "%20"), skip_host=True)
        connection.putheader("host", "x")
        connection.endheaders()
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        assert answer.status == 404
        assert len(body) < 1000
        assert json.loads(body)["error"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["server"] is None
        assert b"\n" not in body


def test_error_for_a_malformed_request_is_not_html(server: Running) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(b"<script>alert(1)</script>\r\n\r\n")
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"x-content-type-options: nosniff" in answer
    assert b"content-type: application/json" in answer
    assert b"script" not in answer


def test_model_errors_of_a_request_are_not_logged(server: Running) -> None:
    lines = len(server.lines)
    tensor = {"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": [TOO_BRIGHT * 10] * 64}
    assert send_request("127.0.0.1", server.port, "POST", "/v2/models/tiny/infer", {"inputs": [tensor]})[0] == 400
    assert send_request("127.0.0.1", server.port, "GET", "/v2/health/ready")[0] == 200
    # The lines about what an earlier test had refused, and about how many of them were left out, may come late.
    assert [line for line in server.lines[lines:] if "refused" not in line] == []


UNPRIVILEGED = ["setpriv", "--reuid", "10001", "--regid", "10001", "--clear-groups"]


def _can_drop_privileges() -> bool:
    """Only root may change mounts, and the interpreter may be in a folder that only root can read."""
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("setpriv") is None:
        return False
    argv = ["unshare", "--mount", *UNPRIVILEGED, sys.executable, "-c", "import serve.options"]
    env = {**os.environ, "PYTHONPATH": str(SOURCE_ROOT)}
    return subprocess.run(argv, check=False, capture_output=True, env=env, cwd="/").returncode == 0


# Every file system but /proc and /dev becomes read-only in a namespace of its own, /tmp too; the user is unprivileged.
ALONE = """
for place in $(awk '$2 !~ "^/(proc|sys|dev/pts|dev$)" { print $2 }' /proc/self/mounts); do
    mount -o remount,bind,ro "$place" || exit 9
done
exec setpriv --reuid 10001 --regid 10001 --clear-groups --no-new-privs --bounding-set=-all "$@"
"""


@pytest.fixture
def readable(bundle_path: Path) -> Iterator[Path]:
    """A copy of the bundle in a folder that other users may read."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(shutil.copytree(bundle_path, Path(folder) / "bundle"))


def test_service_runs_unprivileged_on_a_read_only_file_system(
    readable: Path, free_ports: Callable[[int], list[int]], picture: list[list[int]]
) -> None:
    if not _can_drop_privileges():
        pytest.skip("needs root, unshare, setpriv and an interpreter that everyone may run")
    http_port, grpc_port = free_ports(2)
    argv = ["unshare", "--mount", "bash", "-c", ALONE, "alone", sys.executable, "-m", "serve", str(readable)]
    argv += ["--port", str(http_port), "--grpc-port", str(grpc_port), "--log-format", "text"]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(SOURCE_ROOT), "PYTHONSAFEPATH": "1", "HOME": "/nowhere"}
    with subprocess.Popen(argv, env=env, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        output = [next(line for line in process.stderr if " ready url=" in line or "error" in line)]
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
            mounts = Path(f"/proc/{process.pid}/mounts").read_text().splitlines()
            sent = {"instances": [picture]}
            code, _, answer = send_request("127.0.0.1", http_port, "POST", "/v1/models/tiny:predict", sent)
        finally:
            process.terminate()
            output += process.stderr
            process.wait(300)
    log = "".join(output)
    assert "Uid:\t10001\t10001" in status, log
    assert "CapEff:\t0000000000000000" in status
    assert next(line.split()[3] for line in mounts if line.split()[1] == "/").startswith("ro")
    assert code == 200, log
    assert "digit" in answer["predictions"][0]
    assert process.returncode == 0
    assert "ead-only" not in log
