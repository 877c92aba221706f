"""The V1 protocol: `{"instances": [...]}` in, `{"predictions": [...]}` out, through the bundle's codec."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import orjson

from pipeline.contract.codec import Arrays, Part
from pipeline.system.errors import InvalidPayload
from serve.request_body import parse_object
from serve.runtime.predictor import Predictor

SIGNATURE_NAME = "serving_default"  # of TensorFlow Serving's models; a model here has one signature
_FIELDS = {"instances", "signature_name"}


class CodecPayload:
    """A request in a protocol without ids and timeouts. Its codec is user code, which may block."""

    is_quick, uses_codec, timeout_seconds = False, True, math.inf
    _parts: Sequence[Part] = ()

    def request_id(self) -> str:
        return ""


@dataclass
class Payload(CodecPayload):
    """The body of one prediction."""

    body: bytes
    is_file: bool = False  # the body is an instance, in one of the codec's media types

    @cached_property
    def instances(self) -> Any:
        return [{"b64": base64.b64encode(self.body).decode()}] if self.is_file else parse(self.body)

    def request_id(self) -> str:
        _ = self.instances  # parsed now
        return ""

    def decode(self, predictor: Predictor) -> tuple[Sequence[Part], Sequence[str]]:
        self._parts = predictor.decode(self.instances)
        return self._parts, predictor.session.output_names

    def encode(self, predictor: Predictor, outputs: Sequence[Arrays], version: str) -> bytes:  # noqa: ARG002
        # NaN and infinity, which JSON does not have, become null.
        body = {"predictions": predictor.encode(outputs, self._parts)}
        return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def parse(body: bytes) -> Any:
    """Return the instances of a request body."""
    fields = parse_object(body)
    if "instances" not in fields:
        columns = '; "inputs", a list for each column, is not supported: send a list of instances'
        raise InvalidPayload(f'body: the field "instances" is missing{columns if "inputs" in fields else ""}')
    if unknown := fields.keys() - _FIELDS:
        raise InvalidPayload(f'body: unknown field "{min(unknown)[:80]}"; known fields: instances, signature_name')
    if (name := fields.get("signature_name")) is not None and name != SIGNATURE_NAME:
        raise InvalidPayload(f'body: signature_name {str(name)[:80]!r} is unknown; the only one is "{SIGNATURE_NAME}"')
    return fields["instances"]
