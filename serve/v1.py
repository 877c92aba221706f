"""The V1 protocol: `{"instances": [...]}` in, `{"predictions": [...]}` out, through the bundle's codec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from pipeline.spec.errors import InvalidPayload
from serve.predictor import Predictor


@dataclass(frozen=True)
class Call:
    """One prediction, to be made off the event loop."""

    body: bytes

    def answer(self, predictor: Predictor) -> bytes:
        predictions = predictor.predict(parse(self.body))
        # A number JSON does not know (NaN, infinity) leaves as null.
        return orjson.dumps({"predictions": predictions}, option=orjson.OPT_SERIALIZE_NUMPY)


def parse(body: bytes) -> Any:
    """The instances of a request body."""
    fields = parse_object(body)
    if "instances" not in fields:
        raise InvalidPayload('body: the field "instances" is missing')
    if unknown := sorted(set(fields) - {"instances"}):
        raise InvalidPayload(f'body: unknown field "{unknown[0]}"; the only one is "instances"')
    return fields["instances"]


def parse_object(body: bytes) -> dict[str, Any]:
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidPayload(f"body: not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidPayload("body: must be a JSON object")
    return fields
