"""A service refuses inputs that are shorter or longer than the task allows, in each protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub

from tests.serve.embedder import build

if TYPE_CHECKING:
    from tests.serve.conftest import Launcher, Running

SENTENCE = "input_ids: axis 'length' is {}; it may be 3 to 20 long"


@pytest.fixture(scope="module")
def server(module_launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Running:
    return module_launcher(build(tmp_path_factory.mktemp("embed") / "bundle", shortest=3))


def _tensors(length: int) -> list[dict[str, Any]]:
    data = [1] * length
    names = ("input_ids", "attention_mask")
    return [{"name": name, "datatype": "INT64", "shape": [1, length], "data": data} for name in names]


@pytest.mark.parametrize(("length", "status"), [(2, 400), (3, 200), (20, 200), (21, 400)])
def test_http_refuses_lengths_beyond_the_limits(server: Running, length: int, status: int) -> None:
    instances = {"instances": ["x" * length]}
    for path, body in (("v1/models/tiny:predict", instances), ("v2/models/tiny/infer", {"inputs": _tensors(length)})):
        answer = httpx.post(f"{server.url}/{path}", json=body, timeout=60)
        assert answer.status_code == status, answer.text
        assert (SENTENCE.format(length) in answer.text) == (status == 400)


@pytest.mark.parametrize("length", [2, 3, 21])
def test_grpc_refuses_lengths_beyond_the_limits(server: Running, length: int) -> None:
    request = pb.ModelInferRequest(model_name="tiny")
    for tensor in _tensors(length):
        added = request.inputs.add(name=tensor["name"], datatype="INT64", shape=tensor["shape"])
        added.contents.int64_contents.extend(tensor["data"])
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        stub = GRPCInferenceServiceStub(channel)
        if length == 3:
            assert stub.ModelInfer(request).outputs
            return
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(request)
    error: Any = caught.value
    assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, SENTENCE.format(length))
