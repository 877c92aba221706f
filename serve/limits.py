"""The price list: what connections and requests may take of one process, and what each part of a request costs.

A process in a container is killed by the kernel when it takes more memory than the container may, and a parser that
works for long keeps all others waiting. So each part of a request is paid for before it is made. A request that costs
more than any of its kind may is refused for good, one that finds too little left of what all share for the moment, and
an address whose large bodies are refused again and again has to wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from pipeline.contract.signature import Signature, TensorSpec
from serve.errors import Busy, RequestError, TooLarge, TooManyRefused
from serve.request_context import RequestContext
from serve.wire.connection_limits import MAX_CALL_BYTES, MEMORY_BYTES, max_grpc_connections, max_http_connections

# What Python takes for JSON at most, by the characters that each value has; the parser's own memory is among it. Making
# an object takes about as many nanoseconds as it has bytes, so that these are the prices of work as well.
_VALUE_BYTES, _LIST_BYTES, _OBJECT_BYTES = 56, 96, 320
_COPIES = 2  # of a body: in pieces and whole, or whole and as arrays
OBJECTS_BYTES = 8 << 20  # of them that any body may become
_OBJECT_BYTES_PER_BYTE = 1000  # above that, of a compressed body
_ROOM_OF_TENSORS, _ROOM_OF_EXAMPLES = 4, 16  # times as many objects as the model's tensors, and its examples, have
_MESSAGE_FIELD_COPIES = 32  # of a field of protobuf, by its size: an empty tensor has two bytes
_MAX_FIELDS = 1024  # and some more for each tensor of the model
_FIELDS_PER_TENSOR = 16
MAX_SURPLUS = 16  # of inputs or outputs beyond the model's; of so many a message names the wrong one
MAX_PARAMETERS = 100  # several times as many as the protocol and its extensions have
MAX_SEARCHES = 1000  # for long lists in one body
SMALL_BYTES = 64 << 10  # of a body that takes less memory and time than the service has to spare
_MAX_NUMBER_BYTES = 64  # of one in JSON, with a line break and spaces before it
_ANSWER_NUMBER_BYTES = 32  # of one in an answer: as an array, and in JSON
_FIELDS_BYTES = 1 << 20  # for the other fields of a request, and spaces

SLICE_BYTES = 256 << 10  # of a compressed body that are read, or made, at once: well under a millisecond of work
# Deflate makes zeros a thousand times smaller, and tensors with something in them rarely fifty times. Zeros are sent to
# warm a service up, so a body may always grow to the allowance, which is 27 images of 3 x 224 x 224 floats, or as much
# as the model takes.
MAX_INFLATION = 100
INFLATION_ALLOWANCE_BYTES = 16 << 20

DECODE_SECONDS = 30.0  # for a body to be decoded, where its client has no deadline
_REFUSED_BYTES, _REFUSED_BYTES_PER_SECOND = 1 << 30, 64 << 20  # of refused work: at once, and in the long run
_REFUSED_FOR_BODY = (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
_MAX_ADDRESSES = 4096  # whose refused work is remembered
_RETURNED_BYTES = 64 << 20  # of memory that requests have given back, to be given back to the system


T = TypeVar("T")


class BodyLimits(NamedTuple):
    """What the body of one request may cost."""

    size: int  # in bytes, as sent and decompressed
    object_bytes: float = OBJECTS_BYTES  # that its JSON becomes
    inflated: int = INFLATION_ALLOWANCE_BYTES  # bytes up to which it may grow at any ratio
    fields: int = _MAX_FIELDS  # of a large message of gRPC, and of the tensors in it


class Budget:
    """What all requests of a process may take, from the first byte of a body to the last of its answer."""

    def __init__(self, total_bytes: int = 1 << 30, threads: int | None = None) -> None:
        self.total_bytes, self.held_bytes = total_bytes, 0
        # Apart from inference: what is decoded must not take its turn.
        self.decoders = ThreadPoolExecutor(threads or max(4, os.cpu_count() or 1), thread_name_prefix="decode")
        self._parsing = asyncio.Lock()
        self._most_held = 0  # since memory was given back to the system
        self._refused: dict[str, tuple[float, float]] = {}  # work by address, and when it was that

    def submit(self, work: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self.decoders, work, *args)

    async def parse(self, size: float, parser: Callable[..., T], *args: Any) -> T:
        """Parse a large body in a thread. That holds the interpreter: before the next, the event loop has its turn."""
        if size <= SMALL_BYTES:
            return parser(*args)
        await self._parsing.acquire()
        parsed = self.submit(parser, *args)
        parsed.add_done_callback(lambda _: self._parsing.release())
        try:
            return await asyncio.shield(parsed)  # its thread goes on when its client has gone
        finally:
            del parsed  # it has the error, which has this frame and those of callers, with the body

    def reserve(self, request: RequestContext, size: int) -> None:
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
        request.work += size
        self._most_held = max(self._most_held, self.held_bytes)

    def release(self, request: RequestContext) -> None:
        self.held_bytes -= request.held_bytes
        request.held_bytes = 0
        if self._most_held - self.held_bytes > _RETURNED_BYTES:
            self._most_held = self.held_bytes
            with contextlib.suppress(RuntimeError):  # the service ends, and its threads have ended
                self.decoders.submit(return_memory)

    def charge_refused(self, request: RequestContext, refusal: RequestError | None) -> None:
        """Note the work of a request that was refused for its body: honest clients cause little."""
        if not request.work or refusal is None or refusal.status not in _REFUSED_FOR_BODY:
            return
        if len(self._refused) >= _MAX_ADDRESSES and request.address not in self._refused:
            self._refused = {one: found for one, found in self._refused.items() if self._debt(one) > 0}
            if len(self._refused) >= _MAX_ADDRESSES:
                return
        self._refused[request.address] = self._debt(request.address) + request.work, time.monotonic()

    def check_address(self, request: RequestContext) -> None:
        """Refuse a body that is large or compressed, from an address that has had too many of them refused."""
        if (over := self._debt(request.address) - _REFUSED_BYTES) > 0:
            text = "too many large bodies from this address were refused; small ones without compression are answered"
            raise TooManyRefused(text, over / _REFUSED_BYTES_PER_SECOND)

    def _debt(self, address: str) -> float:
        work, since = self._refused.get(address, (0.0, 0.0))
        return max(0.0, work - (time.monotonic() - since) * _REFUSED_BYTES_PER_SECOND)


def json_memory(text: bytes) -> int:
    """Return what Python takes for the objects that JSON becomes."""
    characters = np.frombuffer(text, np.uint8)
    values, lists, objects = (int(np.count_nonzero(characters == ord(one))) for one in ",[{")
    return _VALUE_BYTES * values + _LIST_BYTES * lists + _OBJECT_BYTES * objects


class BodyPrice:
    """Counts what the body of a request costs, as its pieces come, and refuses it where that is too much."""

    def __init__(
        self, request: RequestContext, limits: BodyLimits, budget: Budget, json_bytes: float = math.inf
    ) -> None:
        """`json_bytes`: of the body that are JSON; files and raw tensors take no more than their size."""
        self._request, self._limits, self._budget = request, limits, budget
        self._json_bytes, self._object_bytes = json_bytes, 0

    def add(self, piece: bytes, sent: float = math.inf) -> None:
        """`sent`: bytes that were sent for the pieces up to this one, where they were compressed."""
        text = piece if len(piece) <= self._json_bytes else piece[: int(self._json_bytes)]
        self._json_bytes -= len(text)
        found = json_memory(text)
        self._object_bytes += found
        self._request.work += len(piece)
        if self._object_bytes > min(self._limits.object_bytes, OBJECTS_BYTES + _OBJECT_BYTES_PER_BYTE * sent):
            raise TooLarge(
                "body: has more numbers, lists and objects than the model takes; send fewer instances at once"
            )
        self._budget.reserve(self._request, _COPIES * len(piece) + found)


def message_memory(message: bytes, most: int, raw_field: int, tensor_fields: tuple[int, ...]) -> int:
    """Return what a message of gRPC takes; the contents of the raw field are kept as they are.

    Raise TooLarge for more than `most` fields, in the message itself and in its tensors.
    """
    if len(message) <= SMALL_BYTES:
        return 0
    count, raw, ends, place = 0, 0, [len(message)], 0
    while ends:
        if place >= ends[-1]:
            ends.pop()
            continue
        if (count := count + 1) > most:
            raise TooLarge(f"message: has more than {most} fields, more than any request for these models")
        key, place = (message[place], place + 1) if message[place] < 0x80 else _varint(message, place)
        small = place < len(message) and message[place] < 0x80
        size, after = (message[place], place + 1) if small else _varint(message, place)
        kind, field = key & 7, key >> 3
        if kind == 2:
            place = after + size
            if len(ends) == 1 and field == raw_field:
                raw += min(size, len(message) - after)
            elif len(ends) == 1 and field in tensor_fields:
                ends.append(min(place, len(message)))
                place = after
        elif kind in (0, 1, 5):
            place = after if not kind else place + (8 if kind == 1 else 4)
        else:  # groups, which no message here has: protobuf decides
            break
    return _MESSAGE_FIELD_COPIES * (len(message) - raw)


def body_limits(signature: Signature, example_bytes: float) -> BodyLimits:
    """Return the limits of a body; `example_bytes`: of the objects of an instance that the bundle has as an example."""
    tensor_bytes = _VALUE_BYTES * sum(_row_elements(spec, signature.limits.axes, math.inf) for spec in signature.inputs)
    row = max(_ROOM_OF_TENSORS * tensor_bytes, _ROOM_OF_EXAMPLES * example_bytes)
    most = max(OBJECTS_BYTES, signature.limits.max_batch_size * row)
    size = signature.limits.max_body_bytes
    inflated = int(min(INFLATION_ALLOWANCE_BYTES, largest_request(signature), size))
    fields = _MAX_FIELDS + _FIELDS_PER_TENSOR * (len(signature.inputs) + len(signature.outputs))
    return BodyLimits(size, most, inflated, fields)


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
    return 0, place + 10


def divide(limit: int, workers: int) -> int:
    """Return the part of one of several processes, which is at least 1."""
    return max(limit // workers, 1)


@dataclass(frozen=True)
class ProcessLimits:
    """What one process may take; several divide the connections and the memory."""

    http_connections: int
    grpc_connections: int
    request_bytes: int  # from the first byte of a body to the last of its answer
    connection_bytes: int  # of what has arrived over HTTP/1.1, and again of what clients have not read
    call_bytes: int  # of gRPC calls that wait for their clients

    @classmethod
    def of_each(cls, workers: int = 1) -> ProcessLimits:
        """Divide the open files, and most of the memory that the models have left; batches have the rest."""
        free = max(0, memory_limit() - resident_memory())

        def share(part: float, least: int, most: int) -> int:
            return min(max(int(part * free) // workers, least), most)

        return cls(
            http_connections=divide(max_http_connections(), workers),
            grpc_connections=divide(max_grpc_connections(), workers),
            request_bytes=share(0.4, least=32 << 20, most=4 << 30),
            connection_bytes=share(0.08, least=8 << 20, most=MEMORY_BYTES),
            call_bytes=share(0.14, least=16 << 20, most=MAX_CALL_BYTES),
        )


_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


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


def return_memory() -> None:
    """Give memory that is free back to the system, which glibc keeps in case the process needs it again."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
