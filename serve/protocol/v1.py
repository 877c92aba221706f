"""The V1 protocol: `{"instances": [...]}` in, `{"predictions": [...]}` out, through the bundle's codec."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import orjson

from pipeline.contract.errors import InvalidPayload
from serve.request_body import parse_object
from serve.runtime.predictor import Predictor


@dataclass(slots=True)
class Payload:
    """The body of one prediction. Its codec is user code, which may block."""

    body: bytes
    _count: int = 0
    _inputs: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    is_quick: ClassVar[bool] = False
    timeout_seconds: ClassVar[float] = math.inf  # the protocol has no field for it

    def request_id(self) -> str:
        """Return no id, since the protocol has none."""
        return ""

    def decode(self, predictor: Predictor) -> tuple[Mapping[str, np.ndarray[Any, Any]], Sequence[str]]:
        instances = parse(self.body)
        self._inputs = predictor.decode(instances)
        self._count = len(instances)
        return self._inputs, predictor.session.outputs

    def encode(self, predictor: Predictor, outputs: Mapping[str, np.ndarray[Any, Any]], version: str) -> bytes:  # noqa: ARG002
        # NaN and infinity, which JSON does not have, become null.
        body = {"predictions": predictor.encode(outputs, self._inputs, self._count)}
        return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def parse(body: bytes) -> Any:
    """Return the instances of a request body."""
    fields = parse_object(body)
    if "instances" not in fields:
        raise InvalidPayload('body: the field "instances" is missing')
    if unknown := sorted(set(fields) - {"instances"}):
        raise InvalidPayload(f'body: unknown field "{unknown[0]}"; the only one is "instances"')
    return fields["instances"]
