"""V2 requests in JSON.

msgspec decodes all of it but long flat lists of numbers, which simdjson reads straight into arrays, at more than twice
the speed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import simdjson

from pipeline.contract.codec import Array
from pipeline.contract.signature import Signature
from pipeline.system.errors import InvalidPayload
from serve.limits import MAX_SEARCHES
from serve.protocol.tensors import Parameters, Tensor
from serve.protocol.validate import check_counts
from serve.request_body import decode_json

LONG_LIST_BYTES = 8 << 10  # with less, msgspec is as fast
_DATA = b'"data"'
_DATA_LIST = re.compile(rb'"data"\s*:\s*\[')
_FIRST_LIST = int.from_bytes(os.urandom(7))  # the number that stands for the first list; clients do not know it
_LIST_DECODER = msgspec.json.Decoder(list[Any])
_Buffer: TypeAlias = tuple[Literal["d", "i", "u"], type[np.generic]]
_FLOAT: _Buffer = ("d", np.float64)
_BUFFERS: dict[str, _Buffer] = {"FP": _FLOAT, "BF": _FLOAT, "IN": ("i", np.int64), "UI": ("u", np.uint64)}


class JsonOutput(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """One requested output."""

    name: str
    parameters: Parameters | None = None


class JsonRequest(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A request; missing fields and null are None."""

    inputs: Sequence[Tensor]
    id: str | None = None
    outputs: Sequence[JsonOutput] | None = None
    parameters: Parameters | None = None
    model_name: str | None = None


_DECODER = msgspec.json.Decoder(JsonRequest)


def read_v2_json(text: bytes | memoryview, signature: Signature | None = None) -> JsonRequest:
    """Parse and validate a request; the signature limits how many inputs and outputs it has."""
    lists: list[memoryview] = []
    rest = _cut_lists(bytes(text), lists) if len(text) >= LONG_LIST_BYTES else text
    try:
        request = decode_json(_DECODER, rest, _count_names, signature)
    except InvalidPayload:
        if not lists:
            raise
        request = decode_json(_DECODER, text, _count_names, signature)  # an error names its place in the whole
    for tensor in request.inputs if lists else ():
        if type(tensor.data) is int and 0 <= (place := tensor.data - _FIRST_LIST) < len(lists):
            tensor.data = functools.partial(_read_list, lists[place], tensor.datatype)
    return request


def _cut_lists(text: bytes, lists: list[memoryview]) -> bytes:
    """Move each long flat list into `lists`, and leave a number in its place.

    None is a part of a string: a quotation mark in a string follows a backslash, and a colon cannot follow a string but
    a name. None ends too early: without strings in it, what is left of a nested list has a bracket too many.
    """
    parts, kept, place = [], 0, text.find(_DATA)
    for _ in range(MAX_SEARCHES):
        if place < 0:
            break
        after = place + len(_DATA)
        if (found := _DATA_LIST.match(text, place)) is not None:
            start, after = found.end() - 1, text.find(b'"', found.end())
            if after < 0:
                after = len(text)
            end = text.find(b"]", start, after) + 1
            if end - start >= LONG_LIST_BYTES:
                parts += [text[kept:start], b"%d" % (_FIRST_LIST + len(lists))]
                lists.append(memoryview(text)[start:end])
                kept = end
        place = text.find(_DATA, after)
    return b"".join([*parts, text[kept:]])


def _read_list(text: memoryview, datatype: str) -> Array | list[Any]:
    if (buffer := _BUFFERS.get(datatype[:2])) is not None:
        with contextlib.suppress(ValueError, TypeError, RuntimeError):  # of simdjson, for other values
            numbers: Any = simdjson.Parser().parse(text)
            return np.frombuffer(numbers.as_buffer(of_type=buffer[0]), buffer[1])
    try:
        return decode_json(_LIST_DECODER, text)
    except InvalidPayload:
        decode_json(_DECODER, bytes(text.obj))  # as above
        raise


def _count_names(request: JsonRequest, signature: Signature | None) -> int:
    """Return how many names the text of a request has that gives no null, unless it has too many tensors."""
    if signature is not None:
        check_counts(len(request.inputs), len(request.outputs or ()), signature)
    values = (request.id, request.outputs, request.parameters, request.model_name)
    count = 1 + len(values) - values.count(None) + len(request.parameters or ())
    for tensor in request.inputs:
        count += 3 + (tensor.data is not None)
        if tensor.parameters is not None:
            count += 1 + len(tensor.parameters)
    for output in request.outputs or ():
        count += 1 if output.parameters is None else 2 + len(output.parameters)
    return count


def index_is_ready_only(fields: Mapping[str, Any]) -> bool:
    """Return the field of a repository index request: whether it is for the models that are ready only."""
    if unknown := fields.keys() - {"ready"}:
        raise InvalidPayload(f"body: contains unknown field `{min(unknown)[:80]}`")
    return fields.get("ready") is not None and flag(fields, "ready", "body", default=False)


def flag(parameters: Parameters, name: str, where: str, *, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise InvalidPayload(f"{where}: {name} must be true or false")
    return value
