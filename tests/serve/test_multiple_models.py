"""Several models in one service, and versions of one, are never confused, however alike their names are."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub

from tests.serve.identity_models import build, build_constant

if TYPE_CHECKING:
    from tests.serve.conftest import Launcher, Running


@pytest.fixture(scope="module")
def server(module_launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Running:
    """Models `a` (two versions) and `b` have an input `x` each, of other types and shapes; `c` has none."""
    root = tmp_path_factory.mktemp("several")
    bundles = [
        f"a={build(root / 'a1', {'x': ('FP32', ['batch', 2])})}",
        f"a={build(root / 'a2', {'x': ('FP32', ['batch', 3])})}",
        f"b={build(root / 'b', {'x': ('INT64', ['batch', 2])})}",
        f"c={build_constant(root / 'c', 2.5)}",
    ]
    return module_launcher(Path(bundles[0]), options=bundles[1:])


def _infer(client: httpx.Client, model: str, *inputs: dict[str, Any]) -> Any:
    return client.post(f"/v2/models/{model}/infer", json={"inputs": list(inputs)})


def _x(datatype: str, data: list[Any]) -> dict[str, Any]:
    return {"name": "x", "datatype": datatype, "shape": [1, len(data)], "data": data}


def test_each_model_and_version_is_validated_by_its_own_signature(client: httpx.Client) -> None:
    two, three, whole = _x("FP32", [0.5, 1.5]), _x("FP32", [0.5, 1.5, 2.5]), _x("INT64", [1, 2])
    for model, right, wrong in (
        ("a/versions/1", two, three),
        ("a/versions/2", three, two),
        ("b", whole, two),
        ("b/versions/1", whole, three),
    ):
        answer = _infer(client, model, right).json()
        assert answer["outputs"][0]["data"] == right["data"]
        assert answer["model_name"] == model[0]
        assert _infer(client, model, wrong).status_code == 400


def test_requests_that_wait_together_are_never_mixed_between_models(client: httpx.Client) -> None:
    def ask(number: int) -> bool:
        model, sent = [
            ("a/versions/1", _x("FP32", [number, number + 0.5])),
            ("a/versions/2", _x("FP32", [number, 0, -number])),
            ("b", _x("INT64", [number, 2**53 + number])),
        ][number % 3]
        return bool(_infer(client, model, sent).json()["outputs"][0]["data"] == sent["data"])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(90)))


def test_model_without_inputs_returns_its_constant(server: Running, client: httpx.Client) -> None:
    (output,) = _infer(client, "c").json()["outputs"]
    assert output == {"name": "y", "datatype": "FP32", "shape": [], "data": [2.5]}
    assert _infer(client, "c", _x("FP32", [1])).status_code == 400
    with contextlib.closing(grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}")) as channel:
        answer = GRPCInferenceServiceStub(channel).ModelInfer(pb.ModelInferRequest(model_name="c"), timeout=60)
    assert (list(answer.outputs[0].shape), list(answer.outputs[0].contents.fp32_contents)) == ([], [2.5])


def test_lists_and_openapi_have_every_model_and_version(client: httpx.Client) -> None:
    assert client.get("/v2/models").json() == {"models": ["a", "b", "c"]}
    index = {(one["name"], one["version"]) for one in client.post("/v2/repository/index").json()}
    assert index == {("a", "1"), ("a", "2"), ("b", "1"), ("c", "1")}
    assert client.get("/v2/models/a").json()["versions"] == ["1", "2"]
    document = client.get("/openapi.json").json()
    assert {path.split("/")[3] for path in document["paths"] if path.endswith("/infer")} == {"a", "b", "c"}
    shapes = {
        version: document["components"]["schemas"][f"a.{version}.InferRequest"]["properties"]["inputs"]["items"][
            "properties"
        ]["shape"]["prefixItems"][1]
        for version in ("1", "2")
    }
    assert shapes == {"1": {"const": 2}, "2": {"const": 3}}
