"""One request from its arrival to its outcome, whatever its protocol.

The connection makes it, and every step that a request takes gets it as an argument: admission, decoding, the queue of
the batcher, the log line, the metrics and the trace. All times are those of `time.monotonic`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pipeline.contract.codec import Array
from pipeline.system.errors import InvalidPayload
from serve.errors import Headers
from serve.monitoring.metrics import PHASES, ModelMetrics
from serve.wire.http1 import Request
from serve.wire.request import IncomingRequest

TIMEOUT_HEADER = b"x-request-timeout"
_GRPC_UNITS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}


class AnsweringVersion(Protocol):
    """The model version that answers a request, as log lines, metrics, traces and response headers name it."""

    name: str
    version: str
    digest: str
    headers: Headers
    metrics: ModelMetrics


class InFlight:
    """A count of predictions. It is no class attribute: a change of one slows down every access to its instances."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


in_flight = InFlight()  # in this process: begun, and not answered yet


class RequestContext(IncomingRequest):
    """What the service notes of a request of HTTP/1.1 or gRPC."""

    protocol = ""  # "v1", "v2", "openai" or "grpc" once the request is known to be a prediction
    size = 0  # bytes of the decompressed body
    held_bytes = 0  # of the body and the answer, counted in the memory budget
    work = 0  # that parsers have done for it, about in nanoseconds; of a small body none is counted
    timeout_seconds = math.inf  # that the client gave in its headers
    deadline = math.inf
    model_version: AnsweringVersion | None = None
    status: int | str = "aborted"  # an HTTP status or the name of a gRPC code; "aborted": no answer began

    # When phases began and ended; 0: not reached.
    decode_started_at = decoded_at = run_started_at = run_ended_at = encoded_at = ended_at = 0.0

    # Set while the request is in the queue of a batcher.
    inputs: Mapping[str, Array]
    output_names: tuple[str, ...]
    rows: int
    batch_key: tuple[Any, ...]
    queued_at: float
    outputs: asyncio.Future[dict[str, Array]]

    @property
    def phase_times(self) -> tuple[float, ...]:
        """Return when each phase began, and when the last ended."""
        return self.decode_started_at, self.decoded_at, self.run_started_at, self.run_ended_at, self.encoded_at

    def phases(self) -> Sequence[tuple[str, float, float]]:
        """Return name, start and end of each phase that began; one without an end was interrupted by a failure."""
        times = self.phase_times
        return [phase for phase in zip(PHASES, times, times[1:], strict=False) if phase[1]]


class HttpRequest(Request, RequestContext):
    """A request of the public HTTP port."""


# How long a client waits, in the three places where it can say so: in seconds, infinity where it does not.


def parse_timeout_header(value: bytes) -> float:
    """Return the seconds of an `x-request-timeout` header."""
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:  # NaN is not either
        text = value[:40].decode("latin-1")
        raise InvalidPayload(f"{TIMEOUT_HEADER.decode()}: {text!r} is no number of seconds above 0")
    return seconds


def parse_timeout_parameter(value: Any) -> float:
    """Return the seconds of the parameter `timeout` of an inference request, which is in microseconds; 0 is none."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidPayload(f"parameters: timeout {str(value)[:40]!r} is no whole number of microseconds from 0 on")
    try:
        return value / 1e6 if value else math.inf
    except OverflowError:  # JSON has whole numbers of any length: longer than any client waits
        return math.inf


def parse_grpc_timeout(value: bytes | None) -> float:
    """Return the seconds of a `grpc-timeout` header: up to eight digits and a unit."""
    if value is None:
        return math.inf
    digits, unit = value[:-1], value[-1:]
    if unit not in _GRPC_UNITS or not digits.isdigit() or len(digits) > 8:
        text = value[:40].decode("latin-1")
        raise InvalidPayload(f"grpc-timeout: {text!r} is no number of up to 8 digits and a unit")
    return int(digits) * _GRPC_UNITS[unit]
