"""The service in a container: whatever clients send, it never takes more memory than its pod may have."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import grpc
import httpx
import pytest

from k8s.objects.serving import default_memory
from pipeline.contract.bundle import Bundle
from serve import limits
from serve.errors import Busy, TooLarge
from serve.grpc import open_inference
from serve.limits import Budget, json_memory, message_memory
from serve.request_context import RequestContext
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 120.0
MAX_BODY_BYTES = 64 << 20  # the default


def memory_group() -> Path | None:
    """Return the folder in which a group with a memory limit can be made: cgroup 1 or 2."""
    for line in Path("/proc/self/cgroup").read_text().splitlines() if sys.platform == "linux" else ():
        _, controllers, group = line.split(":", 2)
        if controllers == "memory":
            return Path("/sys/fs/cgroup/memory") / group.lstrip("/")
        if not controllers and (Path("/sys/fs/cgroup") / "cgroup.subtree_control").is_file():
            return Path("/sys/fs/cgroup") / group.lstrip("/")
    return None


@contextlib.contextmanager
def limited_group(limit: int) -> Iterator[Path]:
    parent = memory_group()
    folder = parent and parent / f"pipe-test-{os.getpid()}"
    try:
        assert folder is not None
        folder.mkdir()
        version_1 = folder / "memory.limit_in_bytes"
        (version_1 if version_1.exists() else folder / "memory.max").write_text(str(limit))
    except (OSError, AssertionError) as error:
        pytest.skip(f"no memory limit can be set here: {error or 'no memory controller'}")
    try:
        yield folder
    finally:
        folder.rmdir()


class Service:
    def __init__(self, bundle: Path, group: Path, log: Path) -> None:
        self.port, self.grpc_port = free_port(), free_port()
        argv = [sys.executable, "-m", "serve", f"tiny={bundle}", "--port", str(self.port)]
        argv += ["--grpc-port", str(self.grpc_port), "--log-format", "text", "--max-body-bytes", str(MAX_BODY_BYTES)]
        enter = f'echo $$ > {group}/cgroup.procs && exec "$@"'
        env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
        self.process = subprocess.Popen(["sh", "-c", enter, "sh", *argv], stderr=subprocess.PIPE, text=True, env=env)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if "ready url=" in line:
                break
        self._log = threading.Thread(target=self.process.stderr.read, daemon=True)
        self._log.start()

    def post(self, path: str, body: bytes, **headers: str) -> int:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        url = f"http://127.0.0.1:{self.port}{path}"
        return httpx.post(url, content=body, headers=sent, timeout=SECONDS).status_code

    def infer(self, message: bytes) -> str:
        options = [("grpc.max_send_message_length", -1)]
        with grpc.insecure_channel(f"127.0.0.1:{self.grpc_port}", options=options) as channel:
            try:
                channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(message, timeout=SECONDS)
            except grpc.RpcError as error:
                return str(error.code().name)
        return "OK"

    def close(self) -> int:
        self.process.terminate()
        status = self.process.wait(SECONDS)
        self._log.join()
        assert self.process.stderr is not None
        self.process.stderr.close()
        return status


def largest(accepted: Callable[..., bool]) -> int:
    """Return the largest number of values that is accepted, within an eighth."""
    low, high = 0, 8 << 20
    while high - low > max(1, high // 8):
        middle = (low + high) // 2
        low, high = (middle, high) if accepted(middle) else (low, middle)
    return low


def at_once(send: Callable[[], object], clients: int) -> None:
    threads = [threading.Thread(target=send) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def instances(item: bytes, count: int) -> bytes:
    return b'{"instances":[' + item * count + b"0]}"


@pytest.mark.long
def test_largest_accepted_requests_fit_into_the_memory_of_a_pod(bundle: Bundle, tmp_path: Path) -> None:
    limit = int(default_memory(bundle).removesuffix("Mi")) << 20
    predict, infer = "/v1/models/tiny:predict", "/v2/models/tiny/infer"
    with limited_group(limit) as group:
        service = Service(bundle.path, group, tmp_path / "log")
        try:
            for item in (b"[],", b'{"a":1},', b"0.123456789012,"):
                bomb = gzip.compress(instances(item, MAX_BODY_BYTES // len(item) - 9))
                assert len(bomb) < 400_000
                assert service.post(predict, bomb, content_encoding="gzip") == 413
                count = largest(lambda count, item=item: service.post(predict, instances(item, count)) == 400)
                assert count > 1000
                post = partial(service.post, predict, gzip.compress(instances(item, count)), content_encoding="gzip")
                at_once(post, clients=12)
            tensor = b'{"inputs":[{"name":"image","datatype":"FP32","shape":[1,1,8,8],"data":['
            assert service.post(infer, tensor + b"1," * 2_000_000 + b"1]}]}") == 413, "no request can have so many"
            empty = b"\n\x04tiny" + b"*\x00" * (8 << 20)
            assert service.infer(empty) in ("RESOURCE_EXHAUSTED", "UNAVAILABLE")
            at_once(lambda: service.infer(empty), clients=8)
            raw = b"\n\x04tiny" + b":" + bytes([0x80, 0x80, 0x80, 0x14]) + b"\0" * (40 << 20)
            at_once(lambda: service.infer(raw), clients=8)
            picture = {"instances": [[[0] * 8] * 8]}
            assert service.post(predict, json.dumps(picture).encode()) == 200
        finally:
            assert service.close() == 0, "it was not killed"


@pytest.mark.parametrize(
    "text", ["[0.1234567,1.5,2.5]", "[[],[[]],[]]", '[{"a":1},{"b":{}}]', '{"abcdefgh":"ijklmnop"}', f"[{'9,' * 999}1]"]
)
def test_json_takes_no_more_memory_than_estimated(text: str) -> None:
    body = b"[" + b",".join([text.encode()] * 6000) + b"]"
    found = subprocess.run([sys.executable, "-c", PEAK], input=body, capture_output=True, check=True)
    assert int(found.stdout) < 2 * len(body) + json_memory(body)


PEAK = """
import resource, sys, orjson
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
body = sys.stdin.buffer.read()
before = peak()
parsed = orjson.loads(body)
print(peak() - before + len(body))
"""


def test_only_requests_that_never_fit_are_refused_as_too_large() -> None:
    budget, one, other = Budget(100 << 20), RequestContext({}, "/"), RequestContext({}, "/")
    budget.reserve(one, 60 << 20)
    with pytest.raises(Busy, match="other requests take 60 MiB"):
        budget.reserve(other, 60 << 20)
    with pytest.raises(TooLarge, match="takes 120 MiB of memory or more, and there are 100 MiB"):
        budget.reserve(one, 60 << 20)
    budget.release(one)
    budget.reserve(other, 60 << 20)
    assert (budget.held_bytes, one.held_bytes, other.held_bytes) == (60 << 20, 0, 60 << 20)


def test_raw_contents_count_once_and_other_fields_much_more() -> None:
    request = open_inference.message_class("ModelInferRequest")(model_name="m")
    request.raw_input_contents.append(bytes(1 << 20))
    request.inputs.add(name="x", datatype="FP32", shape=[1])
    assert priced(request.SerializeToString()) < 32 * 100
    request.inputs[0].contents.fp32_contents.extend([1.0] * 50_000)
    assert priced(request.SerializeToString()) >= 32 * 4 * 50_000


def priced(message: bytes) -> int:
    return message_memory(message, 1000, open_inference.RAW_CONTENTS_FIELD, open_inference.TENSOR_FIELDS)


FLOODS = {
    "inputs": b"*\0" * 50_000,
    "fields of an input": b"*\xa0\x8d\x06" + b"\x18\1" * 50_000,
    "parameters of an input": b"*\xa0\x8d\x06" + b"".join(b'"\x08\n\x06%06d' % number for number in range(10_000)),
    "parameters": b"".join(b'"\x08\n\x06%06d' % number for number in range(10_000)),
    "unknown fields": b"\xf8\x07\0" * 50_000,
    "no fields": b"\0" * 100_000,
    "numbers without an end": b"\xff" * 100_000,
}


@pytest.mark.parametrize("name", FLOODS)
def test_messages_with_very_many_fields_are_refused_before_they_are_parsed(name: str) -> None:
    with pytest.raises(TooLarge, match="more than 1000 fields"):
        priced(FLOODS[name])


@pytest.mark.parametrize("damaged", [b":" + b"\xff" * 9 + b"\x01" + b"x" * 100_000, b"\x0b" * 100_000])
def test_damaged_messages_are_left_to_the_parser(damaged: bytes) -> None:
    assert priced(damaged) >= 0


@pytest.mark.parametrize(
    ("membership", "files", "limit"),
    [
        ("0::/pod\n", {"memory.max": "900"}, 900),
        ("0::/pod\n", {"memory.max": "max"}, None),
        ("0::/\n", {"pod/memory.max": "800"}, None),
        ("5:memory:/pod\n0::/\n", {"memory/pod/memory.limit_in_bytes": "700"}, 700),
        ("5:cpu,memory:/pod\n", {"memory/memory.limit_in_bytes": "600"}, 600),
    ],
)
def test_the_limit_of_the_container_is_found(
    membership: str, files: dict[str, str], limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "self").write_text(membership)
    monkeypatch.setattr(limits, "_CGROUPS", tmp_path)
    monkeypatch.setattr(limits, "_MEMBERSHIP", tmp_path / "self")
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert limits.memory_limit() == (machine if limit is None else limit)
