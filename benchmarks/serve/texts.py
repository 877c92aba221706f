"""Tokens a second of a language model: read and written by the service, beside the bare runtime with the same batch."""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serve import decoder
from benchmarks.serve.load import RequestSpec
from benchmarks.serve.running import Running, free_ports, log_file
from benchmarks.serve.workloads import NAME

THREADS = 2
_JSON = (("content-type", "application/json"),)


@dataclass(frozen=True)
class Size:
    rows: tuple[int, ...]  # clients at once, each with one text
    length: int  # tokens of a prompt
    tokens: int  # written after the first
    rounds: int


NO_ROW = (
    "no row for onnxruntime-genai: it takes one width for keys and values, "
    "where this cache has a latent vector and a narrower part for places"
)
FULL = Size((1, 8), 128, 64, 7)
QUICK = Size((4,), 32, 8, 1)


@dataclass(frozen=True)
class Row:
    """Medians over the rounds; a ratio compares the service with the bare runtime of the same round."""

    rows: int
    read_per_second: float
    read_to_raw: float
    written_per_second: float
    written_to_raw: float
    least_written_to_raw: float
    streamed_to_raw: float  # as events instead of whole answers, reading and writing together
    cpu_to_raw: float  # what both took of the processors, bare runtime ÷ service: other work moves it less


Seconds = tuple[float, float, float]  # for reading, for writing, and of the processors for both


def measure(size: Size) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder, _started(decoder.bundle(Path(folder) / "b", THREADS)) as service:
        return [_row(service, Path(folder) / "b", rows, size) for rows in size.rows]


def text(rows: Sequence[Row]) -> str:
    head = "| clients | read tokens/s | ÷ raw | written tokens/s | ÷ raw (least) | streamed ÷ raw | CPU: raw ÷ ours |"
    lines = [
        f"| {row.rows} | {row.read_per_second:,.0f} | {row.read_to_raw:.3f} | {row.written_per_second:,.0f} "
        f"| {row.written_to_raw:.3f} ({row.least_written_to_raw:.3f}) | {row.streamed_to_raw:.3f} "
        f"| {row.cpu_to_raw:.3f} |"
        for row in rows
    ]
    return "\n".join([head, "|" + "---|" * 7, *lines, "", NO_ROW])


def _row(service: tuple[Running, str], bundle: Path, rows: int, size: Size) -> Row:
    running, url = service
    laps: list[tuple[Seconds, Seconds, float]] = []
    for _ in range(size.rounds):
        raw = _measure_raw(bundle, rows, size)
        running.go_on()
        try:
            ours = _measure_service(running, url, rows, size)
            streamed = _together(url, rows, size, size.tokens + 1, stream=True)
        finally:
            running.hold()
        laps.append((raw, ours, streamed))
    median, written = statistics.median, [raw[1] / ours[1] for raw, ours, _ in laps]
    return Row(
        rows,
        read_per_second=rows * size.length / median(ours[0] for _, ours, _ in laps),
        read_to_raw=median(raw[0] / ours[0] for raw, ours, _ in laps),
        written_per_second=rows * size.tokens / median(ours[1] for _, ours, _ in laps),
        written_to_raw=median(written),
        least_written_to_raw=min(written),
        streamed_to_raw=median((raw[0] + raw[1]) / streamed for raw, _, streamed in laps),
        cpu_to_raw=median(raw[2] / ours[2] for raw, ours, _ in laps),
    )


def _measure_raw(bundle: Path, rows: int, size: Size) -> Seconds:
    """Run in a separate process, like the service."""
    numbers = map(str, (THREADS, rows, size.length, size.tokens))
    argv = [sys.executable, "-m", "benchmarks.serve.raw_texts", str(bundle / "model.onnx"), *numbers]
    read, written, cpu = json.loads(subprocess.run(argv, capture_output=True, check=True, timeout=600).stdout)
    return read, written, cpu


def _measure_service(running: Running, url: str, rows: int, size: Size) -> Seconds:
    """Return seconds for the prompts (one token), for the other tokens (the rest of many), and CPU seconds."""
    _together(url, rows, size, 2)  # so that it is warm, whatever it keeps
    read_seconds = _together(url, rows, size, 1)
    cpu_before = running.cpu_seconds()
    total_seconds = _together(url, rows, size, size.tokens + 1)
    return read_seconds, max(1e-9, total_seconds - read_seconds), running.cpu_seconds() - cpu_before


def _together(url: str, rows: int, size: Size, tokens: int, *, stream: bool = False) -> float:
    prompts = np.random.default_rng(time.time_ns()).integers(1, 8000, (rows, size.length)).tolist()
    bodies = [_body(prompt, tokens, stream=stream) for prompt in prompts]
    with ThreadPoolExecutor(rows) as pool:
        started = time.perf_counter()
        counts = list(pool.map(lambda body: _ask(url, body, stream=stream), bodies))
        seconds = time.perf_counter() - started
    assert all(count == tokens for count in counts), f"{counts} tokens, requested {tokens}"
    return seconds


def _body(prompt: list[int], tokens: int, *, stream: bool) -> bytes:
    body: dict[str, Any] = {"model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    return json.dumps(body).encode()


def _ask(url: str, body: bytes, *, stream: bool = False) -> int:
    """Return the number of tokens that the response reports."""
    request = urllib.request.Request(url, body, dict(_JSON))  # noqa: S310  # our own service
    with urllib.request.urlopen(request, timeout=300) as answer:  # noqa: S310  # as above
        answer_body = answer.read()
    if stream:
        answer_body = (
            answer_body.removesuffix(b"data: [DONE]\n\n").rstrip().rsplit(b"\n\n", 1)[-1].removeprefix(b"data: ")
        )
    return int(json.loads(answer_body)["usage"]["completion_tokens"])


@contextlib.contextmanager
def _started(bundle: Path) -> Iterator[tuple[Running, str]]:
    http, grpc = free_ports(2)
    argv = [sys.executable, "-m", "serve", str(bundle), "--port", str(http), "--grpc-port", str(grpc)]
    with log_file() as log:
        running = Running("pipe", argv, log)
        try:
            url = f"http://127.0.0.1:{http}/openai/v1/completions"
            running.wait_for_answer(RequestSpec(url, _body([1], 1, stream=False), _JSON))
            running.hold()
            yield running, url
        finally:
            running.close()
