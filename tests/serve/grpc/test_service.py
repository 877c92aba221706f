from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub

from pipeline.contract.bundle import Bundle
from serve.runtime.session import Session

if TYPE_CHECKING:
    from tests.serve.conftest import Running


@pytest.fixture(scope="module")
def stub(server: Running) -> Iterator[Any]:
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        yield GRPCInferenceServiceStub(channel)


@pytest.fixture(scope="module")
def image() -> np.ndarray[Any, Any]:
    return np.random.default_rng(13).random((2, 1, 8, 8)).astype(np.float32)


def _request(image: np.ndarray[Any, Any], *, raw: bool, **changes: Any) -> Any:
    tensor = {"name": "image", "datatype": "FP32", "shape": image.shape} | changes
    if not raw:
        tensor.setdefault("contents", {"fp32_contents": image.ravel().tolist()})
    contents = [image.tobytes()] if raw else []
    return pb.ModelInferRequest(model_name="tiny", id="7", inputs=[tensor], raw_input_contents=contents)


@pytest.mark.parametrize("raw", [True, False])
def test_answer_equals_onnx_runtime_raw_and_typed(
    stub: Any, bundle: Bundle, image: np.ndarray[Any, Any], raw: bool
) -> None:
    answer = stub.ModelInfer(_request(image, raw=raw), timeout=60)
    (output,) = answer.outputs
    assert (answer.id, output.name, output.datatype, list(output.shape)) == ("7", "logits", "FP32", [2, 10])
    found = np.frombuffer(answer.raw_output_contents[0], np.float32) if raw else output.contents.fp32_contents
    wanted = Session(bundle, "cpu", 1).run({"image": image})["logits"]
    np.testing.assert_array_equal(np.array(found, np.float32).reshape(2, 10), wanted)


def test_health_and_metadata_equal_rest(stub: Any) -> None:
    assert stub.ServerLive(pb.ServerLiveRequest(), timeout=60).live
    assert stub.ServerReady(pb.ServerReadyRequest(), timeout=60).ready
    assert stub.ModelReady(pb.ModelReadyRequest(name="tiny"), timeout=60).ready
    metadata = stub.ModelMetadata(pb.ModelMetadataRequest(name="tiny"), timeout=60)
    assert (metadata.platform, list(metadata.inputs[0].shape)) == ("onnx_onnxv1", [-1, 1, 8, 8])


def test_answer_names_bundle_and_process(
    stub: Any, server: Running, bundle: Bundle, image: np.ndarray[Any, Any]
) -> None:
    _, call = stub.ModelInfer.with_call(_request(image, raw=True), timeout=60)
    metadata = dict(call.trailing_metadata())
    assert metadata["x-bundle-digest"] == bundle.digest
    assert metadata["x-served-by"] == str(server.process.pid)


@pytest.mark.parametrize(
    ("raw", "changes", "named"),
    [
        (True, {"name": "picture"}, "unknown input 'picture'"),
        (True, {"datatype": "FP64"}, "image: datatype 'FP64'"),
        (True, {"shape": [1, 1, 8, 8]}, "image: data with 128 elements"),
        (True, {"shape": [-2, 1, 8, 8]}, "image: shape"),
        (True, {"contents": {"fp32_contents": [1.0]}}, "image: has contents beside raw_input_contents"),
        (False, {"shape": [128]}, "image: shape"),
        (False, {"datatype": "FLOAT"}, "image: unknown datatype 'FLOAT'"),
        (False, {"datatype": "FP16"}, "image: FP16 must be in raw_input_contents"),
        (False, {"datatype": "BF16"}, "image: BF16 must be in raw_input_contents"),
        (
            True,
            {"parameters": {"shared_memory_region": {"string_param": "r"}}},
            "shared_memory_region' is not supported",
        ),
        (False, {"contents": {"int_contents": [1] * 128}}, "image: FP32 must be in fp32_contents, not in int_contents"),
        (False, {"contents": {}}, "image: data with 0 elements"),
    ],
)
def test_malformed_request_is_an_invalid_argument(
    stub: Any, image: np.ndarray[Any, Any], raw: bool, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(_request(image, raw=raw, **changes), timeout=60)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert named in caught.value.details()


def test_raw_contents_must_match_the_number_of_inputs(stub: Any, image: np.ndarray[Any, Any]) -> None:
    request = _request(image, raw=True)
    request.raw_input_contents.append(b"")
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(request, timeout=60)
    assert caught.value.details() == "raw_input_contents: 2 given for 1 inputs"


def test_values_the_model_rejects_are_an_invalid_argument(stub: Any, image: np.ndarray[Any, Any]) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(_request(image + 1000, raw=True), timeout=60)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "indices element out of data bounds" in caught.value.details()


def test_unknown_model_is_not_found(stub: Any, image: np.ndarray[Any, Any]) -> None:
    request = _request(image, raw=True)
    request.model_name = "other"
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(request, timeout=60)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_oversized_message_is_rejected(stub: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(pb.ModelInferRequest(raw_input_contents=[b"\0" * 200_000]), timeout=60)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_clients_cannot_unload_the_model(stub: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="tiny"), timeout=60)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert stub.ModelReady(pb.ModelReadyRequest(name="tiny"), timeout=60).ready
