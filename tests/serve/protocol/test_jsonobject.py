"""How deep a client's JSON may be, whatever stands in its strings."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from pipeline.spec.errors import InvalidPayload
from serve.protocol.jsonobject import MOST_LEVELS, levels, parse_object


def nested(depth: int, value: Any = 1) -> Any:
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("text", "depth"),
    [
        (b"", 0),
        (b"5", 0),
        (b"[]", 1),
        (b'{"a": [1, [2], {"b": 3}], "c": []}', 3),
        (b'{"[[[[": "{{{{", "a": []}', 2),
        (rb'["\"[[[\"", "\\", [1], "\\\"{"]', 2),
        (b'["[[[ never closed', 1),
        (b"]]]][[", 0),
    ],
)
def test_levels_are_those_outside_of_strings(text: bytes, depth: int) -> None:
    assert levels(text) == depth


def test_what_is_as_deep_as_may_be_is_read_and_one_level_more_is_not() -> None:
    deepest = {"a": nested(MOST_LEVELS - 1)}
    assert parse_object(json.dumps(deepest).encode()) == deepest
    with pytest.raises(InvalidPayload, match="more than 64 levels deep"):
        parse_object(json.dumps({"a": nested(MOST_LEVELS)}).encode())


def test_many_lists_beside_one_another_are_not_deep() -> None:
    wide = {"instances": [[[1, 2], [3, 4]]] * 500, "text": "[" * 500}
    assert parse_object(memoryview(json.dumps(wide).encode())) == wide


def test_what_is_too_deep_takes_no_more_memory_than_it_came_with() -> None:
    text = b'{"a": ' + b'{"a":[' * 400 + b" " * 100_000
    tracemalloc.start()
    try:
        with pytest.raises(InvalidPayload, match="levels deep"):
            parse_object(text)
        assert tracemalloc.get_traced_memory()[1] < 1.1 * len(text)
    finally:
        tracemalloc.stop()
