"""Examples of requests to a model, from the golden requests of its bundle; they are in `/openapi.json`."""

from __future__ import annotations

import logging
from typing import Any

import orjson

from pipeline.contract.bundle import Bundle
from pipeline.contract.golden import Golden
from pipeline.contract.signature import Signature

_MAX_BYTES = 16 << 10  # of an example; people read and edit it

log = logging.getLogger(__name__)


def request_examples(bundle: Bundle) -> dict[str, Any]:
    """Return an example for each route that has one: the first golden instance, and the first golden row as tensors."""
    try:
        golden = bundle.golden()
    except OSError as error:  # the bundle's folder may be deleted after loading
        log.warning("/openapi.json has no examples: %s", error)
        return {}
    examples: dict[str, Any] = {"predict": {"instances": golden.instances[:1]}} if golden.instances else {}
    if tensors := golden_row(golden, bundle.signature, _MAX_BYTES):
        examples["infer"] = {"inputs": tensors}
    return {kind: example for kind, example in examples.items() if len(orjson.dumps(example, default=str)) < _MAX_BYTES}


def golden_row(golden: Golden, signature: Signature, limit: int) -> list[dict[str, Any]]:
    """Return the first row of the golden inputs as tensors of a request; none if it has more values than the limit."""
    datatypes = {spec.name: spec.datatype for spec in signature.inputs}
    rows = {name: array[:1] if array.ndim else array for name, array in golden.inputs.items()}
    if sum(array.size for array in rows.values()) > limit:
        return []
    return [
        {"name": name, "shape": list(array.shape), "datatype": datatypes[name], "data": array.ravel().tolist()}
        for name, array in rows.items()
    ]
