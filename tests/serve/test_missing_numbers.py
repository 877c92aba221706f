"""A missing number is null in JSON and NaN in raw and typed data, in requests and answers of every protocol."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import httpx
import jsonschema
import numpy as np
import pytest
from kserve import InferInput, InferRequest
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub

from pipeline.contract.bundle import Bundle, open_bundle
from serve.kserve_model import BundleModel
from tests.serve.conftest import Launcher, Running
from tests.serve.identity_models import build

ROWS = np.array([[1.5, np.nan, 2.0], [np.nan, np.nan, np.nan]], np.float32)
NULLS = [1.5, None, 2.0, None, None, None]
FULL = np.array([[0.25], [0.5]], np.float32)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A model that returns its inputs; `x` may have missing numbers, `full` may not."""
    specs: Any = {"x": ("FP32", ["batch", 3]), "full": ("FP32", ["batch", 1])}
    return open_bundle(build(tmp_path_factory.mktemp("missing") / "bundle", specs, missing={"x"}))


@pytest.fixture(scope="module")
def running(module_launcher: Launcher, bundle: Bundle) -> Running:
    return module_launcher(bundle.path)


def tensors(x: Any, full: Any, rows: int = 2) -> dict[str, Any]:
    return {
        "inputs": [
            {"name": "x", "shape": [rows, 3], "datatype": "FP32", "data": x},
            {"name": "full", "shape": [rows, 1], "datatype": "FP32", "data": full},
        ]
    }


def test_null_comes_back_as_null_and_fits_the_schemas(running: Running) -> None:
    infer, schemas = f"{running.url}/v2/models/tiny/infer", httpx.get(f"{running.url}/openapi.json").json()
    schemas = schemas["components"]["schemas"]
    for data in (NULLS, [NULLS[:3], NULLS[3:]]):
        body = tensors(data, FULL.ravel().tolist())
        answer = httpx.post(infer, json=body)
        jsonschema.validate(body, schemas["tiny.1.InferRequest"])
        jsonschema.validate(answer.json(), schemas["tiny.1.InferAnswer"])
        assert [one["data"] for one in answer.json()["outputs"]] == [NULLS, FULL.ravel().tolist()]
        assert b"NaN" not in answer.content


def test_the_metadata_name_the_inputs(running: Running) -> None:
    sentence = "x: a missing number is null in JSON, and NaN in raw and typed data"
    assert httpx.get(f"{running.url}/v2/models/tiny").json()["properties"]["missing"] == sentence
    with grpc.insecure_channel(f"127.0.0.1:{running.grpc_port}") as channel:
        answer = GRPCInferenceServiceStub(channel).ModelMetadata(pb.ModelMetadataRequest(name="tiny"), timeout=60)
    assert [one.name for one in answer.inputs] == ["x", "full"]


def test_a_long_list_with_nulls_is_read(running: Running) -> None:
    data = [None if index % 3 == 0 else index / 2 for index in range(3 * 16)]
    padding = " " * (300 << 10)  # beyond what is parsed on the event loop
    body = json.dumps(tensors(data, [0.5] * 16, rows=16)).replace('"inputs"', padding + '"inputs"')
    answer = httpx.post(
        f"{running.url}/v2/models/tiny/infer", content=body, headers={"content-type": "application/json"}
    )
    assert answer.json()["outputs"][0]["data"] == data


def test_null_where_no_number_was_missing_is_refused(running: Running) -> None:
    answer = httpx.post(f"{running.url}/v2/models/tiny/infer", json=tensors(NULLS, [None, 1.0]))
    sentence = "full: data holds null, but the model was trained without missing numbers here"
    assert (answer.status_code, answer.json()["error"]) == (400, sentence)
    body = json.dumps(tensors(ROWS.ravel().tolist(), [0.5, 0.5]))
    assert "NaN" in body
    answer = httpx.post(
        f"{running.url}/v2/models/tiny/infer", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400, "NaN is no JSON"


def test_raw_data_carry_nan_in_both_directions(running: Running) -> None:
    body = tensors(None, None)
    for one, array in zip(body["inputs"], (ROWS, FULL), strict=True):
        one["parameters"] = {"binary_data_size": array.nbytes}
        del one["data"]
    head = json.dumps({**body, "parameters": {"binary_data_output": True}}).encode()
    headers = {"inference-header-content-length": str(len(head)), "content-type": "application/octet-stream"}
    content = head + ROWS.tobytes() + FULL.tobytes()
    answer = httpx.post(f"{running.url}/v2/models/tiny/infer", content=content, headers=headers)
    assert answer.content.endswith(ROWS.tobytes() + FULL.tobytes())


@pytest.mark.parametrize("raw", [True, False])
def test_grpc_carries_nan_in_raw_and_typed_contents(running: Running, raw: bool) -> None:
    request = pb.ModelInferRequest(model_name="tiny")
    for name, array in (("x", ROWS), ("full", FULL)):
        tensor = request.inputs.add(name=name, datatype="FP32", shape=array.shape)
        if raw:
            request.raw_input_contents.append(array.tobytes())
        else:
            tensor.contents.fp32_contents.extend(array.ravel())
    with grpc.insecure_channel(f"127.0.0.1:{running.grpc_port}") as channel:
        answer = GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=60)
    found = (
        np.frombuffer(answer.raw_output_contents[0], np.float32) if raw else answer.outputs[0].contents.fp32_contents
    )
    np.testing.assert_array_equal(np.reshape(found, (2, 3)), ROWS)


def test_the_page_shows_null_in_its_example_and_signature(running: Running) -> None:
    page = httpx.get(running.url, headers={"accept": "text/html"}).text
    assert "FP32 or null" in page
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    (example,) = data["form"]["examples"]
    assert example["inputs"][0]["data"][0] is None
    assert httpx.post(f"{running.url}/v2/models/tiny/infer", json=example).status_code == 200


@pytest.mark.parametrize("binary", [True, False])
def test_kserve_gets_null_and_nan_alike(bundle: Bundle, binary: bool) -> None:
    served = BundleModel("tiny", bundle)
    served.load()
    inputs = []
    for name, array, data in (("x", ROWS, NULLS), ("full", FULL, FULL.ravel().tolist())):
        tensor = InferInput(name, list(array.shape), "FP32", None if binary else data)
        if binary:
            tensor.set_data_from_numpy(array, binary_data=True)
        inputs.append(tensor)
    answer: Any = asyncio.run(served.predict(InferRequest("tiny", inputs)))
    np.testing.assert_array_equal(answer.outputs[0].as_numpy(), ROWS)
