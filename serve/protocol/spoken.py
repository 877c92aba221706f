"""Texts over the Open Inference Protocol: instances and predictions as tensors of BYTES, through the codec as in V1.

A model has it whose golden instances are texts. Whoever sends the tensors of the graph is answered with tensors still.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson

from pipeline.spec.signature import Signature, TensorSpec
from serve.protocol.tensors import Array, Request, Wish
from serve.runtime.predictor import Predictor

INSTANCES, PREDICTIONS = "instances", "predictions"
_DATATYPES = {PREDICTIONS: "BYTES"}


class Read(NamedTuple):
    """What is run for a request, and what its answer is made of."""

    arrays: Mapping[str, Array]
    names: Sequence[str]  # of the outputs the model is asked for
    wishes: Sequence[Wish]
    texts: int = 0  # how many came


def signature_of(signature: Signature, instances: Sequence[Any]) -> Signature | None:
    """What is taken and given beside the graph's own tensors, if the codec's instances are texts."""
    if not instances or not all(isinstance(one, str) for one in instances) or INSTANCES in signature.input_specs:
        return None
    return Signature(
        inputs=(TensorSpec(name=INSTANCES, datatype="BYTES", shape=("batch",)),),
        outputs=(TensorSpec(name=PREDICTIONS, datatype="BYTES", shape=("batch",)),),
        codec=signature.codec,
        limits=signature.limits,
        runtime=signature.runtime,
    )


def read(request: Request, predictor: Predictor) -> Read:
    spoken = predictor.spoken
    if spoken is None or [one.name for one in request.inputs] != [INSTANCES]:
        wishes = request.wishes(predictor.signature)
        return Read(request.arrays(predictor.signature), [wish.name for wish in wishes], wishes)
    texts = request.arrays(spoken)[INSTANCES].tolist()
    return Read(predictor.decode(texts), predictor.session.outputs, request.wishes(spoken), len(texts))


def given(
    count: int, outputs: Mapping[str, Array], predictor: Predictor
) -> tuple[Mapping[str, Array], Mapping[str, str]]:
    """The tensors of the answer and their datatypes; a prediction that is no text is one in JSON, as V1 writes it."""
    if not count:
        return outputs, predictor.datatypes
    found = np.empty(count, object)
    found[:] = [_text(one) for one in predictor.encode(outputs, count)]
    return {PREDICTIONS: found}, _DATATYPES


def _text(prediction: Any) -> str:
    if isinstance(prediction, str):
        return prediction
    return orjson.dumps(prediction, option=orjson.OPT_SERIALIZE_NUMPY).decode()
