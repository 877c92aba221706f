"""A codec whose encode() cuts off padding by the decoded inputs, which must be those of the same request."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson
import pytest

from pipeline.api import Bundle
from pipeline.contract.bundle import open_bundle
from serve.grpc.messages import Payload as RpcPayload
from serve.grpc.open_inference import ModelInferRequest
from serve.kserve_model import BundleModel
from serve.model_version import ModelVersion
from serve.protocol import v1, v2
from serve.request_context import RequestContext
from serve.runtime.batcher import concatenate, split
from serve.runtime.loading import load_predictor
from serve.runtime.predictor import Predictor
from tests.serve.special_models import padded

TEXTS = [["abc"], ["x", "yz"], [""], ["abcdefgh"], ["a", "", "bb"]]
ANSWERS = [["bcd"], ["y", "z{"], [""], ["bcdefghi"], ["b", "", "cc"]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return padded(tmp_path_factory.mktemp("padded") / "bundle")


@pytest.fixture(scope="module")
def predictor(path: Path) -> Predictor:
    return load_predictor(open_bundle(path), None, None)


def v1_payload(texts: list[str]) -> Any:
    return v1.Payload(orjson.dumps({"instances": texts}))


def v2_payload(texts: list[str]) -> Any:
    tensor = {"name": "instances", "shape": [len(texts)], "datatype": "BYTES", "data": texts}
    return v2.Payload("tiny", orjson.dumps({"inputs": [tensor]}), None, None)


def rpc_payload(texts: list[str]) -> Any:
    request = ModelInferRequest(model_name="tiny")
    tensor = request.inputs.add(name="instances", datatype="BYTES", shape=[len(texts)])
    tensor.contents.bytes_contents.extend(text.encode() for text in texts)
    return RpcPayload(request)


def predictions(answer: Any) -> list[str]:
    if isinstance(answer, bytes):
        return list(orjson.loads(answer)["predictions"])
    if isinstance(answer, v2.Answer):
        return list(orjson.loads(answer.body)["outputs"][0]["data"])
    return [one.decode() for one in answer.outputs[0].contents.bytes_contents]


@pytest.mark.parametrize("payload", [v1_payload, v2_payload, rpc_payload])
def test_requests_of_one_batch_are_encoded_with_their_own_inputs(predictor: Predictor, payload: Any) -> None:
    payloads, batch = [payload(texts) for texts in TEXTS], []
    for one in payloads:
        context = RequestContext({}, "/")
        (decoded,), _ = one.decode(predictor)
        context.inputs = decoded.arrays
        context.rows = len(context.inputs["codes"])
        batch.append(context)
    parts = split(predictor.run(concatenate(batch)), batch)
    answers = [one.encode(predictor, [part], "1") for one, part in zip(payloads, parts, strict=True)]
    assert [predictions(answer) for answer in answers] == ANSWERS


def test_concurrent_requests_are_encoded_with_their_own_inputs(predictor: Predictor) -> None:
    async def predict_all() -> list[Any]:
        with ThreadPoolExecutor(2) as pool:
            version = ModelVersion("tiny", "1", predictor, pool)
            payloads = [make(texts) for make in (v1_payload, v2_payload, rpc_payload) for texts in TEXTS]
            return await asyncio.gather(*(version.predict(RequestContext({}, "/"), one) for one in payloads))

    assert [predictions(answer) for answer in asyncio.run(predict_all())] == ANSWERS * 3


def test_bundle_and_kserve_encode_with_the_inputs_too(path: Path) -> None:
    bundle = Bundle.load(path)
    served = BundleModel("tiny", open_bundle(path))
    served.load()
    for texts, answer in zip(TEXTS, ANSWERS, strict=True):
        assert bundle.predict(texts) == answer
        assert served._predict({"instances": texts}) == {"predictions": answer}
