"""A JSON object from a client: how deep it may be before a parser follows, and a sentence where it is none."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import orjson

from pipeline.spec.errors import InvalidPayload

MOST_LEVELS = 64  # of lists and objects within one another
_FEW = MOST_LEVELS // 2  # lists, and as many objects, cannot be deeper together
_OPENING = 2  # the bit that `[` and `{` have and `]` and `}` have not
_NO_SIGNS = bytes(set(range(256)) - set(b'[]{}"'))
_ESCAPED = re.compile(rb"\\.", re.DOTALL)


def parse_object(body: bytes | memoryview) -> dict[str, Any]:
    check_levels(body)
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidPayload(f"body: not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidPayload("body: must be a JSON object")
    return fields


def check_levels(body: bytes | memoryview) -> None:
    """Few signs cannot be deep, and most bodies have few; only where there are many is it looked how they stand."""
    text = bytes(body)  # no copy of what is bytes already
    if any(occurrences(text, sign, _FEW) > _FEW for sign in (b"[", b"{")) and levels(text) > MOST_LEVELS:
        raise InvalidPayload(f"body: lists and objects stand within one another more than {MOST_LEVELS} levels deep")


def occurrences(text: bytes, sign: bytes, most: int) -> int:
    """How often it is there, up to one more than `most`: looking for the next is quicker than counting a few."""
    found, place = 0, text.find(sign)
    while place >= 0 and found <= most:
        found, place = found + 1, text.find(sign, place + 1)
    return found


def levels(text: bytes) -> int:
    """The most that are open at one place; those in strings are not counted."""
    if b"\\" in text:
        text = _ESCAPED.sub(b"", text)
    outside = b"".join(text.translate(None, _NO_SIGNS).split(b'"')[::2])
    signs = np.frombuffer(outside, np.uint8) & _OPENING
    return int(np.cumsum(signs.astype(np.int64) - 1).max(initial=0))
