"""How long a client waits for its answer, in the three places where it can say so; in seconds, infinity if nowhere."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pipeline.spec.errors import InvalidPayload

HEADER = b"x-request-timeout"
_UNITS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}  # gRPC's


def of_header(headers: Mapping[bytes, bytes]) -> float:
    """`x-request-timeout`, in seconds."""
    said = headers.get(HEADER)
    if said is None:
        return math.inf
    try:
        seconds = float(said)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:  # nor is NaN
        raise InvalidPayload(f"{HEADER.decode()}: {said[:40].decode('latin-1')!r} is no number of seconds above 0")
    return seconds


def of_parameter(value: Any) -> float:
    """The parameter `timeout` of an inference request: in microseconds, as Triton has it, 0 for none."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidPayload(f"parameters: timeout {str(value)[:40]!r} is no whole number of microseconds from 0 on")
    try:
        return value / 1e6 if value else math.inf
    except OverflowError:  # JSON has whole numbers of any length: longer than anybody waits
        return math.inf


def of_call(said: bytes | None) -> float:
    """`grpc-timeout`: up to eight digits and a unit."""
    if said is None:
        return math.inf
    digits, unit = said[:-1], said[-1:]
    if unit not in _UNITS or not digits.isdigit() or len(digits) > 8:
        raise InvalidPayload(f"grpc-timeout: {said[:40].decode('latin-1')!r} is no number of up to 8 digits and a unit")
    return int(digits) * _UNITS[unit]
