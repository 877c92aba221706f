"""`python -m benchmarks.trace_request`: print the source files that one warm V1 prediction passes through.

A reader who follows a request jumps from file to file. A service with a small digits model is started in this
process, warmed up, and then every function of ours that one request enters is recorded. Two numbers come out:
how many files the request passes, and how often it enters a file again that it had left before.
"""

from __future__ import annotations

import http.client
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from benchmarks.call_trace import ROOT, CallTrace
from benchmarks.serve.workloads import NAME, WORKLOADS

OURS = (ROOT / "serve", ROOT / "pipeline")
WARM_UP_REQUESTS = 300
TRACED_REQUESTS = 20  # a timer of the service may run during one of them: the shortest trace is the request alone
PATH = f"/v1/models/{NAME}:predict"


class Profiler:
    """A profiler for all threads, set when they start; it records while there is a trace."""

    def __init__(self) -> None:
        self.trace: CallTrace | None = None
        threading.setprofile(self)
        sys.setprofile(self)

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        if self.trace is not None and event == "call":
            self.trace.record(frame)

    def trace_call(self, action: Callable[[], None]) -> CallTrace:
        """Record what is entered in any thread while `action` runs."""
        self.trace = trace = CallTrace(OURS)
        try:
            action()
        finally:
            self.trace = None
        return trace


def trace_requests(port: int, profiler: Profiler, traces: list[CallTrace]) -> None:
    """Warm the service up, trace some requests one by one, then end the service."""
    body = WORKLOADS["digits"].json_v1()
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    try:
        sock = socket.create_connection(("127.0.0.1", port), timeout=30)

        def predict() -> None:
            sock.sendall(head.encode() + body)
            response = http.client.HTTPResponse(sock)
            response.begin()
            response.read()
            assert response.status == 200, response.status
            time.sleep(0.005)  # what the service does after the response belongs to the request

        for _ in range(WARM_UP_REQUESTS):
            predict()
        traces.extend(profiler.trace_call(predict) for _ in range(TRACED_REQUESTS))
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


def trace_prediction() -> CallTrace:
    """Start a service in this process and return the trace of one warm prediction."""
    from serve.__main__ import serve
    from serve.options import parse_options

    profiler = Profiler()
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        bundle = WORKLOADS["digits"].bundle(Path(folder) / "bundle")
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        traces: list[CallTrace] = []
        client = threading.Thread(target=_wait_and_trace, args=(port, profiler, traces))
        client.start()
        serve(parse_options([str(bundle), "--port", str(port), "--grpc-port", "-1", "--log-format", "text"]))
        client.join()
    return min(traces, key=lambda trace: len(trace.calls))


def _wait_and_trace(port: int, profiler: Profiler, traces: list[CallTrace]) -> None:
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            break
        except OSError:
            threading.Event().wait(0.05)
    trace_requests(port, profiler, traces)


def main() -> None:
    trace = trace_prediction()
    if "--calls" in sys.argv[1:]:
        trace.print_calls()
    for number, file in enumerate(trace.files, 1):
        print(f"{number:3} {file} ({trace.visits.count(file)} visits)")
    print(f"files: {len(trace.files)}, returns to a file already left: {trace.returns}, calls: {len(trace.calls)}")


if __name__ == "__main__":
    main()
