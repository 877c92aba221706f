"""Bodies that cost more than they weigh: what honest clients notice of a megabyte a second of each, and the memory."""

from __future__ import annotations

import gzip
import http.client
import itertools
import json
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h2.config
import h2.connection
import h2.events

from benchmarks.serve.contenders import CONTENDERS
from benchmarks.serve.load import RequestSpec, percentile
from benchmarks.serve.running import Running, free_ports, log_file
from benchmarks.serve.workloads import WORKLOADS

_BYTES_PER_SECOND = 1e6
_CLIENTS = 8  # of the attack
_HONEST_SECONDS = 0.02  # between an honest request and the next
_WIRE_BYTES = 200_000  # of a body that is sent as it is
_INFLATED_BYTES = 16_000_000  # of one that is compressed: no more is allowed at any ratio
_PREDICT, _INFER = "/v1/models/net:predict", "/v2/models/net/infer"
_TENSOR = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,1,8,8],"data":[%b]}]}'


def _filled(frame: bytes, item: bytes, size: int) -> bytes:
    return frame % b",".join([item] * (size // (len(item) + 1)))


# For a model `net` with one input `x`: the path, and a body of about so many bytes.
JSON_BODIES: dict[str, tuple[str, Callable[[int], bytes]]] = {
    "V1 empty lists": (_PREDICT, lambda size: _filled(b'{"instances":[%b]}', b"[]", size)),
    "V1 empty objects": (_PREDICT, lambda size: _filled(b'{"instances":[%b]}', b"{}", size)),
    "V1 digits": (_PREDICT, lambda size: _filled(b'{"instances":[%b]}', b"1", size)),
    "V1 one long number": (_PREDICT, lambda size: b'{"instances":[%b]}' % (b"1" * size)),
    "V1 a string": (_PREDICT, lambda size: b'{"instances":["%b"]}' % (b"\\u0041" * (size // 6))),
    "V1 names": (_PREDICT, lambda size: b"{%b}" % b",".join([b'"%d":0' % n for n in range(size // 10)])),
    "V2 digits": (_INFER, lambda size: _filled(_TENSOR, b"1", size)),
    "V2 empty lists": (_INFER, lambda size: _filled(_TENSOR, b"[]", size)),
    "V2 lists": (_INFER, lambda size: b'{"inputs":[{%b' % (b'"data":[' * (size // 8))),
    "V2 inputs": (_INFER, lambda size: _filled(b'{"inputs":[%b]}', b"{}", size)),
    "V2 names": (_INFER, lambda size: b'{"inputs":[{%b}]}' % b",".join([b'"%d":0' % n for n in range(size // 10)])),
    "V2 parameters": (
        _INFER,
        lambda size: b'{"parameters":{%b},"inputs":[]}' % b",".join([b'"%d":0' % n for n in range(size // 10)]),
    ),
}
MESSAGES: dict[str, Callable[[int], bytes]] = {
    "gRPC empty inputs": lambda size: b"\n\x03net" + b"*\0" * (size // 2),
    "gRPC empty outputs": lambda size: b"\n\x03net" + b"2\0" * (size // 2),
    "gRPC empty raw contents": lambda size: b"\n\x03net" + b":\0" * (size // 2),
    "gRPC parameters": lambda size: b"\n\x03net" + b"".join([b"\x22\x08\n\x06%06d" % n for n in range(size // 10)]),
    "gRPC unknown fields": lambda size: b"\n\x03net" + b"\xf8\x07\0" * (size // 3),
}


@dataclass(frozen=True)
class Attack:
    name: str
    path: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    grpc: bool = False


@dataclass(frozen=True)
class Row:
    attack: str
    body_bytes: int
    sent_mb: float  # in a second
    answers: str  # by status
    honest: int  # requests, of which none failed
    p50_ms: float
    p99_ms: float
    cores: float  # that the service used
    peak_mb: float
    after_mb: float  # a moment after the attack


def attacks() -> Iterator[Attack]:
    yield Attack("none", "", b"")
    for name, (path, make) in JSON_BODIES.items():
        yield Attack(name, path, make(_WIRE_BYTES))
        yield Attack(f"{name}, gzip", path, gzip.compress(make(_INFLATED_BYTES)), (("content-encoding", "gzip"),))
    yield Attack("V1 empty gzip members", _PREDICT, gzip.compress(b"") * 50_000, (("content-encoding", "gzip"),))
    for name, make in MESSAGES.items():
        yield Attack(name, "", make(_WIRE_BYTES), grpc=True)
        yield Attack(f"{name}, gzip", "", gzip.compress(make(_INFLATED_BYTES)), (("grpc-encoding", "gzip"),), grpc=True)
    yield Attack("gRPC empty gzip members", "", gzip.compress(b"") * 50_000, (("grpc-encoding", "gzip"),), grpc=True)


def measure(seconds: float, only: Sequence[str] = ()) -> list[Row]:
    """Attack a service of the digits model with each body in turn; each has a fresh service."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        bundle = WORKLOADS["digits"].bundle(Path(folder) / "bundle")
        for attack in attacks():
            if not only or attack.name in only:
                with _service(bundle) as (running, http_port, grpc_port):
                    rows.append(_measure(attack, running, http_port, grpc_port, seconds))
                print(text(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    return rows


@contextmanager
def _service(bundle: Path) -> Iterator[tuple[Running, int, int]]:
    http_port, grpc_port = free_ports(2)
    ours = next(contender for contender in CONTENDERS if contender.name == "ours")
    with log_file() as log:
        running = Running("ours", ours.argv(bundle, http_port, grpc_port, 0), log)
        try:
            url, json_type = f"http://127.0.0.1:{http_port}{_INFER}", (("content-type", "application/json"),)
            running.wait_for_answer(RequestSpec(url, WORKLOADS["digits"].json_v2(), json_type))
            yield running, http_port, grpc_port
        finally:
            running.close()


def _measure(attack: Attack, running: Running, http_port: int, grpc_port: int, seconds: float) -> Row:
    sender = None
    if attack.path or attack.grpc:
        with tempfile.NamedTemporaryFile() as body:
            body.write(attack.body)
            body.flush()
            port = grpc_port if attack.grpc else http_port
            arguments = json.dumps([body.name, port, attack.path, dict(attack.headers), attack.grpc, seconds])
            argv = [sys.executable, "-m", "benchmarks.serve.attacks", arguments]
            sender = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
            assert sender.stdout is not None
            sender.stdout.readline()  # it has begun
    cpu, start, peak, latencies, failed = running.cpu_seconds(), time.monotonic(), 0, [], 0
    honest = WORKLOADS["digits"].json_v2()
    connection = http.client.HTTPConnection("127.0.0.1", http_port, timeout=60)
    for number in itertools.count():
        began = time.monotonic()
        if began - start > seconds:
            break
        connection.request("POST", _INFER, honest, {"content-type": "application/json"})
        response = connection.getresponse()
        response.read()
        latencies.append(time.monotonic() - began)
        failed += response.status != 200
        if number % 10 == 0:
            peak = max(peak, running.memory_bytes())
        time.sleep(_HONEST_SECONDS)
    connection.close()
    cores = (running.cpu_seconds() - cpu) / (time.monotonic() - start)
    sent, answers = 0.0, "-"
    if sender is not None:
        sent, answers = json.loads(sender.communicate()[0])
    time.sleep(2)
    ordered = sorted(latencies)
    return Row(
        attack.name,
        len(attack.body),
        sent / 1e6,
        answers + (f" ({failed} honest requests failed)" if failed else ""),
        len(latencies),
        1e3 * percentile(ordered, 0.5),
        1e3 * percentile(ordered, 0.99),
        cores,
        peak / 1e6,
        running.memory_bytes() / 1e6,
    )


def text(rows: Sequence[Row]) -> str:
    head = "| attack | bytes | MB/s | answers | honest p50 ms | p99 ms | cores | MB at most | MB after |"
    lines = [
        f"| {row.attack} | {row.body_bytes:,} | {row.sent_mb:.2f} | {row.answers} | {row.p50_ms:.1f} "
        f"| {row.p99_ms:.1f} | {row.cores:.2f} | {row.peak_mb:.0f} | {row.after_mb:.0f} |"
        for row in rows
    ]
    return "\n".join([head, "|---" * 9 + "|", *lines])


# The attacker, a process of its own


class _Pace:
    """Lets clients send so many bytes a second together."""

    def __init__(self) -> None:
        self._lock, self._due = threading.Lock(), time.monotonic()
        self.answers: Counter[str] = Counter()
        self.sent = 0

    def wait(self, size: int) -> None:
        with self._lock:
            self.sent += size
            self._due = max(self._due, time.monotonic() - 1) + size / _BYTES_PER_SECOND
            due = self._due
        time.sleep(max(0.0, due - time.monotonic()))


def _send(arguments: str) -> None:
    name, port, path, headers, grpc, seconds = json.loads(arguments)
    body, end, pace = Path(name).read_bytes(), time.monotonic() + seconds, _Pace()
    print("begun", flush=True)

    def client() -> None:
        while time.monotonic() < end:
            try:
                for answer in _calls(port, body, headers) if grpc else _posts(port, path, body, headers):
                    pace.answers[answer] += 1
                    pace.wait(len(body))
                    if time.monotonic() > end:
                        return
            except (OSError, http.client.HTTPException) as error:
                pace.answers[type(error).__name__] += 1
                pace.wait(len(body))

    clients = [threading.Thread(target=client, daemon=True) for _ in range(_CLIENTS)]
    began = time.monotonic()
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join(max(0.0, end + 5 - time.monotonic()))
    listed = ", ".join(f"{count} x {answer}" for answer, count in pace.answers.most_common())
    print(json.dumps([pace.sent / (time.monotonic() - began), listed]))


def _posts(port: int, path: str, body: bytes, headers: dict[str, str]) -> Iterator[str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    while True:
        connection.request("POST", path, body, {"content-type": "application/json", **headers})
        response = connection.getresponse()
        response.read()
        yield str(response.status)


def _calls(port: int, message: bytes, headers: dict[str, str]) -> Iterator[str]:
    """Call ModelInfer over one connection, again and again; grpc's own client cannot send what is badly compressed."""
    body = struct.pack(">BI", "grpc-encoding" in headers, len(message)) + message
    head = [(":method", "POST"), (":scheme", "http"), (":path", "/inference.GRPCInferenceService/ModelInfer")]
    head += [(":authority", "x"), ("content-type", "application/grpc"), ("te", "trailers"), *headers.items()]
    with socket.create_connection(("127.0.0.1", port), 60) as sock:
        http2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        http2.initiate_connection()
        while True:
            stream, place, status = http2.get_next_available_stream_id(), 0, ""
            http2.send_headers(stream, head)
            while not status:
                while place < len(body) and (size := min(http2.local_flow_control_window(stream), 16_384)):
                    http2.send_data(stream, body[place : place + size], place + size >= len(body))
                    place += size
                sock.sendall(http2.data_to_send())
                if not (received := sock.recv(1 << 16)):
                    raise ConnectionResetError
                for event in http2.receive_data(received):
                    if isinstance(event, h2.events.TrailersReceived | h2.events.ResponseReceived):
                        found: dict[Any, Any] = dict(list[Any](event.headers or ()))
                        status = found.get("grpc-status", status)
                    elif isinstance(event, h2.events.StreamReset | h2.events.ConnectionTerminated):
                        raise ConnectionResetError
            yield f"status {status}"


if __name__ == "__main__":
    _send(sys.argv[1])
