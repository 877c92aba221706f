"""The memory that requests may take: what there is beside the models, and what a body takes once it is parsed.

A process in a container is killed by the kernel when it takes more than the container may, and with it all requests
that it has. So each part of a request is counted before it takes memory, and refused where there is none for it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from pipeline.contract.signature import Signature, TensorSpec
from serve.errors import Busy, TooLarge

# What Python takes for JSON at most, by the characters that each value has; the parser's own memory is among it.
_VALUE_BYTES, _LIST_BYTES, _OBJECT_BYTES = 56, 96, 320
_COPIES = 2  # of a body: in pieces and whole, or whole and as arrays
_MESSAGE_FIELD_COPIES = 32  # of a field of protobuf, by its size: an empty tensor has two bytes
_MAX_MESSAGE_FIELDS = 1024  # that are read one by one
_SMALL_BYTES = 64 << 10  # of a message that takes less memory than the service has to spare
_MAX_NUMBER_BYTES = 64  # of one in JSON, with a line break and spaces before it
_ANSWER_NUMBER_BYTES = 32  # of one in an answer: as an array, and in JSON
_FIELDS_BYTES = 1 << 20  # for the other fields of a request, and spaces
_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


class HoldsMemory(Protocol):
    held_bytes: int


class MemoryBudget:
    """The memory for all requests of a process, from the first byte of a body to the last of its answer."""

    def __init__(self, total_bytes: int = 1 << 30) -> None:
        self.total_bytes, self.held_bytes = total_bytes, 0

    def reserve(self, request: HoldsMemory, size: int) -> None:
        """Reserve memory for a request, or raise TooLarge if it can never have so much, or Busy if others have it."""
        if self.held_bytes + size > self.total_bytes:
            if (needed := request.held_bytes + size) > self.total_bytes:
                raise TooLarge(
                    f"body: takes {needed >> 20} MiB of memory or more, and there are {self.total_bytes >> 20} MiB for "
                    "requests; send fewer instances at once, or tensors in binary form"
                )
            raise Busy(f"other requests take {self.held_bytes >> 20} MiB of memory already; try again in a moment")
        self.held_bytes += size
        request.held_bytes += size

    def release(self, request: HoldsMemory) -> None:
        self.held_bytes -= request.held_bytes
        request.held_bytes = 0


def memory_limit() -> int:
    """Return the memory of the container, or of the machine if there is no limit."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _limit_files():
        try:
            limits.append(int(path.read_text()))
        except (OSError, ValueError):  # no such controller, or `max`
            continue
    return min(limits)


def _limit_files() -> list[Path]:
    """Return the files that may contain a limit: of this process's groups, and as a container shows them."""
    try:
        lines = _MEMBERSHIP.read_text().splitlines()
    except OSError:  # no Linux
        return []
    files = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        for place in (group.lstrip("/"), ""):
            if not controllers:
                files += [root / place / "memory.max" for root in (_CGROUPS, _CGROUPS / "unified")]
            elif "memory" in controllers.split(","):
                files.append(_CGROUPS / "memory" / place / "memory.limit_in_bytes")
    return files


def resident_memory() -> int:
    """Return the memory that this process takes."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # no Linux: as little as the service takes with a small model
        return 100 << 20
    return pages * os.sysconf("SC_PAGE_SIZE")


def body_memory(piece: bytes) -> int:
    """Return what a piece of a body takes, if it is JSON."""
    characters = np.frombuffer(piece, np.uint8)
    values, lists, objects = (int(np.count_nonzero(characters == ord(one))) for one in ",[{")
    return _COPIES * len(piece) + _VALUE_BYTES * values + _LIST_BYTES * lists + _OBJECT_BYTES * objects


def message_memory(message: bytes, raw_field: int) -> int:
    """Return what a protobuf message takes; the contents of the raw field are kept as they are."""
    if len(message) <= _SMALL_BYTES:
        return 0
    place = raw = 0
    for _ in range(_MAX_MESSAGE_FIELDS):
        key, place = _varint(message, place)
        size, after = _varint(message, place)
        if key & 7 != 2:  # the end, or a field without a size
            break
        if key >> 3 == raw_field:
            raw += min(size, len(message) - after)
        place = after + size
    return _MESSAGE_FIELD_COPIES * (len(message) - raw)


def largest_request(signature: Signature) -> float:
    """Return the bytes of a request that has as many rows as are allowed, each number as long as JSON can have it."""
    limits = signature.limits
    rows = limits.max_batch_size
    elements = sum(rows * _row_elements(spec, limits.axes, unknown=math.inf) for spec in signature.inputs)
    return _MAX_NUMBER_BYTES * elements + _FIELDS_BYTES


def answer_row_memory(signature: Signature) -> int:
    """Return the bytes that a row of the answer takes as arrays and as JSON; sizes that are unknown are not counted."""
    elements = sum(_row_elements(spec, signature.limits.axes, unknown=0) for spec in signature.outputs)
    return int(_ANSWER_NUMBER_BYTES * elements)


def _row_elements(spec: TensorSpec, axes: Mapping[str, int], unknown: float) -> float:
    if spec.datatype == "BYTES":
        return unknown
    return math.prod(axis if isinstance(axis, int) else axes.get(axis, unknown) for axis in spec.shape[1:])


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """Return a number of protobuf's encoding and the place behind it; 0 at the end."""
    value = 0
    for digit, byte in enumerate(data[place : place + 10]):
        value |= (byte & 0x7F) << 7 * digit
        if byte < 0x80:
            return value, place + digit + 1
    return 0, place
