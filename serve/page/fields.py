"""The fields of the page's form, which follow from the example instances of the bundle.

An object is a row of fields; a text, a number or a picture is a form of one field. A picture is base64 of a PNG or JPEG
file, bare or as `{"b64": …}`. There is no form for anything else, such as a list of numbers, which is edited as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_PICTURES = ("iVBORw0KGgo", "/9j/")  # how base64 of PNG and JPEG files begins
_MAX_FIELDS = 100
_MAX_LINE_CHARACTERS = 60  # longer texts have a field of several lines


def form_fields(examples: Sequence[Any]) -> dict[str, Any] | None:
    """Describe the fields of an instance; None if an instance has no fields.

    `bare`: the instance is the value of its only field.
    """
    if not examples:
        return None
    first = examples[0]
    if not isinstance(first, Mapping) or _is_wrapped(first):
        field = _field("", examples, bare=True)
        return None if field["kind"] == "json" else {"kind": "fields", "bare": True, "fields": [field]}
    rows = [example for example in examples if isinstance(example, Mapping)]
    fields = [_field(str(name), [row.get(name) for row in rows]) for name in first]
    if not 0 < len(fields) <= _MAX_FIELDS or all(field["kind"] == "json" for field in fields):
        return None
    return {"kind": "fields", "bare": False, "fields": fields}


def _field(name: str, values: Sequence[Any], bare: bool = False) -> dict[str, Any]:
    present = [value for value in values if value is not None]
    kinds = {_kind(value, bare) for value in present}
    if kinds == {"text", "lines"}:
        kinds = {"lines"}
    kind = kinds.pop() if len(kinds) == 1 else "json"  # of several types, or always null
    return {
        "name": name,
        "kind": kind,
        "wrapped": kind == "picture" and _is_wrapped(present[0]),
        "nullable": len(present) < len(values),
    }


def _kind(value: Any, bare: bool) -> str:
    match value:
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str() if value.startswith(_PICTURES):
            return "picture"
        case str():
            return "lines" if bare or len(value) > _MAX_LINE_CHARACTERS or "\n" in value else "text"
    return "picture" if _is_wrapped(value) else "json"


def _is_wrapped(value: Any) -> bool:
    """Return whether it is `{"b64": picture}`."""
    return isinstance(value, Mapping) and list(value) == ["b64"] and str(value["b64"]).startswith(_PICTURES)
