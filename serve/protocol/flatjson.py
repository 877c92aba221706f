"""Long flat lists of numbers in a JSON request, read straight into arrays: twice as fast and more as by way of lists.

What is not of this form, or wrong in any way, is left to the plain reader, which has the sentences.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np
import simdjson

from serve.protocol.jsonobject import occurrences

LEAST_BYTES = 8 << 10  # below it the plain reader is as fast

_SAMPLE_BYTES = 256
_Buffer: TypeAlias = tuple[Literal["d", "i", "u"], type[np.generic]]
_FLOAT: _Buffer = ("d", np.float64)
_BUFFERS: dict[str, _Buffer] = {"FP": _FLOAT, "BF": _FLOAT, "IN": ("i", np.int64), "UI": ("u", np.uint64)}


def likely(text: bytes) -> bool:
    """Whether the middle of it is numbers one after another."""
    middle = len(text) // 2
    return not text[middle : middle + _SAMPLE_BYTES].translate(None, b"0123456789+-.eE, \t\r\n")


def read(text: bytes) -> dict[str, Any] | None:
    """The request's fields, with arrays where the inputs' data are numbers; None where another must read it."""
    try:
        fields = _fields(simdjson.Parser().parse(text))
        inputs = [_fields(one) for one in fields["inputs"]]
        # Each list that is not nested has one bracket, so that a bracket more means a list within one.
        lists = 1 + 2 * len(inputs) + ("outputs" in fields)
        if occurrences(text, b"[", lists) != lists:
            return None
        found = [{key: _input(key, value, one["datatype"]) for key, value in one.items()} for one in inputs]
    except (ValueError, TypeError, KeyError, RuntimeError):  # all that simdjson raises, and a wrong form
        return None
    return {key: found if key == "inputs" else _plain(value) for key, value in fields.items()}


def _fields(found: Any) -> dict[str, Any]:
    """By name; the parser's own access would take the first of two fields of one name, and all else the last."""
    if not isinstance(found, simdjson.Object) or len(names := list(found.keys())) != len(set(names)):
        raise TypeError
    return {name: found[name] for name in names}


def _input(key: str, value: Any, datatype: Any) -> Any:
    buffer = _BUFFERS.get(str(datatype)[:2])
    if key != "data" or buffer is None or not isinstance(value, simdjson.Array):
        return _plain(value)
    return np.frombuffer(value.as_buffer(of_type=buffer[0]), buffer[1])


def _plain(value: Any) -> Any:
    if isinstance(value, simdjson.Array):
        return value.as_list()
    return value.as_dict() if isinstance(value, simdjson.Object) else value
