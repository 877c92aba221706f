"""Texts as BYTES tensors over V2, for codecs whose instances are texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import jsonschema
import numpy as np
import pytest
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub

from serve.protocol.tensors import to_raw
from tests.serve.conftest import Launcher, Running
from tests.serve.special_models import worded

TEXTS = ["a", "", "wörter", "nine long"]
ANSWERS = ['{"next":2.0}', '{"next":1.0}', '{"next":7.0}', "long"]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, module_launcher: Launcher) -> Running:
    return module_launcher(worded(tmp_path_factory.mktemp("worded") / "bundle"))


@pytest.fixture
def client(running: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{running.port}") as found:
        yield found


def sent(data: list[Any], **more: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "instances", "shape": [len(data)], "datatype": "BYTES", "data": data}], **more}


def test_texts_are_answered_as_v1_answers_them(client: httpx.Client) -> None:
    predictions = client.post("/v1/models/tiny:predict", json={"instances": TEXTS}).json()["predictions"]
    answer = client.post("/v2/models/tiny/infer", json=sent(TEXTS, id="mine")).json()
    assert answer["outputs"] == [{"name": "predictions", "shape": [4], "datatype": "BYTES", "data": ANSWERS}]
    assert answer["id"] == "mine"
    assert [json.loads(one) if one.startswith("{") else one for one in ANSWERS] == predictions


def test_texts_may_be_sent_and_returned_as_raw_bytes(client: httpx.Client) -> None:
    raw = to_raw(np.array(TEXTS, object), "BYTES")
    one = {"name": "instances", "shape": [4], "datatype": "BYTES", "parameters": {"binary_data_size": len(raw)}}
    head = json.dumps({"inputs": [one], "parameters": {"binary_data_output": True}}).encode()
    headers = {"inference-header-content-length": str(len(head)), "content-type": "application/octet-stream"}
    answer = client.post("/v2/models/tiny/infer", content=head + raw, headers=headers)
    length = int(answer.headers["inference-header-content-length"])
    assert json.loads(answer.content[:length])["outputs"][0]["name"] == "predictions"
    assert answer.content[length:] == to_raw(np.array(ANSWERS, object), "BYTES")


@pytest.mark.parametrize("raw", [False, True])
def test_grpc_accepts_texts_too(running: Running, raw: bool) -> None:
    texts = [text.encode() for text in TEXTS]
    request = pb.ModelInferRequest(model_name="tiny")
    given = request.inputs.add(name="instances", datatype="BYTES", shape=[4])
    if raw:
        request.raw_input_contents.append(to_raw(np.array(TEXTS, object), "BYTES"))
    else:
        given.contents.bytes_contents.extend(texts)
    with grpc.insecure_channel(f"127.0.0.1:{running.grpc_port}") as channel:
        answer = GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=60)
    found = answer.raw_output_contents[0] if raw else list(answer.outputs[0].contents.bytes_contents)
    assert found == (to_raw(np.array(ANSWERS, object), "BYTES") if raw else [one.encode() for one in ANSWERS])


def test_graph_tensors_are_still_accepted_and_both_are_documented(client: httpx.Client) -> None:
    tensor = {"inputs": [{"name": "x", "shape": [2, 1], "datatype": "FP32", "data": [1.0, 2.0]}]}
    answers = [client.post("/v2/models/tiny/infer", json=one).json() for one in (tensor, sent(TEXTS))]
    assert answers[0]["outputs"][0]["data"] == [2.0, 3.0]
    received = client.get("/v2/models/tiny").json()
    assert ([one["name"] for one in received["inputs"]], "instances" in received["properties"]) == (["x"], True)
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    for one, answer in zip((tensor, sent(TEXTS)), answers, strict=True):
        jsonschema.validate(one, schemas["tiny.1.InferRequest"])
        jsonschema.validate(answer, schemas["tiny.1.InferAnswer"])


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (sent([]), "instances: the batch is empty"),
        (sent(["a"] * 17), "instances: a batch of 17 exceeds the limit of 16"),
        (sent([1]), "instances: data holds values that are not strings"),
        (sent(["a"], outputs=[{"name": "y"}]), "outputs: unknown output 'y'; the model has 'predictions'"),
        ({"inputs": [*sent(["a"])["inputs"]] * 2}, "inputs: unknown input 'instances'; the model takes 'x'"),
    ],
)
def test_invalid_list_of_texts_is_refused(client: httpx.Client, body: dict[str, Any], sentence: str) -> None:
    answer = client.post("/v2/models/tiny/infer", json=body)
    assert (answer.status_code, answer.json()["error"]) == (400, sentence)


def test_model_without_text_instances_refuses_texts(server: Running) -> None:
    answer = httpx.post(f"{server.url}/v2/models/tiny/infer", json=sent(["a"]))
    assert (answer.status_code, "unknown input 'instances'" in answer.json()["error"]) == (400, True)
