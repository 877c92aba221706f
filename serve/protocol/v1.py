"""The V1 protocol: `{"instances": [...]}` in, `{"predictions": [...]}` out, through the bundle's codec."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from pipeline.contract.errors import InvalidPayload
from serve.protocol.v2_json import parse_object
from serve.runtime.predictor import Predictor


class Call:
    """One prediction. Its codec is user code: nobody knows at first how long it takes."""

    quick = False
    timeout_seconds = math.inf  # the protocol has no word for it; the header has

    def __init__(self, body: bytes) -> None:
        self._body, self.size = body, len(body).bit_length()
        self._count = 0

    def key(self) -> str:
        """The protocol knows no id."""
        return ""

    def read(self, predictor: Predictor) -> tuple[Mapping[str, np.ndarray[Any, Any]], Sequence[str]]:
        instances = parse(self._body)
        arrays = predictor.decode(instances)
        self._count = len(instances)
        return arrays, predictor.session.outputs

    def write(self, predictor: Predictor, outputs: Mapping[str, np.ndarray[Any, Any]], version: str) -> bytes:  # noqa: ARG002
        # A number JSON does not know (NaN, infinity) leaves as null.
        found = {"predictions": predictor.encode(outputs, self._count)}
        return orjson.dumps(found, option=orjson.OPT_SERIALIZE_NUMPY)


def parse(body: bytes) -> Any:
    """The instances of a request body."""
    fields = parse_object(body)
    if "instances" not in fields:
        raise InvalidPayload('body: the field "instances" is missing')
    if unknown := sorted(set(fields) - {"instances"}):
        raise InvalidPayload(f'body: unknown field "{unknown[0]}"; the only one is "instances"')
    return fields["instances"]
