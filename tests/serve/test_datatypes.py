"""Every datatype comes back unchanged from the real service, in every encoding of the protocol."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import numpy as np
import pytest
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub

from pipeline.contract.signature import NUMPY_TYPES
from serve.grpc.messages import _CONTENTS
from serve.protocol.tensors import to_raw
from tests.serve.identity_models import build, sample

if TYPE_CHECKING:
    from tests.serve.conftest import Launcher, Running


Array = np.ndarray[Any, Any]
SPECS: dict[str, dict[str, tuple[str, list[int | str]]]] = {
    "rows": {kind.lower(): (kind, ["batch", 3]) for kind in NUMPY_TYPES if kind != "BF16"},
    "brain": {"b": ("BF16", ["batch", 3]), "f": ("FP32", ["batch", 1])},
    "still": {"scalar": ("FP32", []), "number": ("INT64", []), "fixed": ("UINT8", [2, 3]), "list": ("BYTES", ["n"])},
}


@pytest.fixture(scope="module", params=SPECS)
def served(
    request: pytest.FixtureRequest, module_launcher: Launcher, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Running, Mapping[str, tuple[str, Array]]]:
    """A service that returns its inputs, and samples for it."""
    specs = SPECS[request.param]
    running = module_launcher(build(tmp_path_factory.mktemp(request.param) / "bundle", specs))
    return running, {name: (kind, sample(kind, shape, rows=3)) for name, (kind, shape) in specs.items()}


@pytest.fixture(scope="module")
def stub(served: tuple[Running, Any]) -> Iterator[Any]:
    with contextlib.closing(grpc.insecure_channel(f"127.0.0.1:{served[0].grpc_port}")) as channel:
        yield GRPCInferenceServiceStub(channel)


def _tensor(name: str, kind: str, array: Array, **more: Any) -> dict[str, Any]:
    return {"name": name, "datatype": kind, "shape": list(array.shape), **more}


def _assert_same(outputs: Mapping[str, tuple[str, list[int], Any]], given: Mapping[str, tuple[str, Array]]) -> None:
    assert set(outputs) == {f"{name}_out" for name in given}
    for name, (kind, array) in given.items():
        assert outputs[f"{name}_out"] == (kind, list(array.shape), array.ravel().tolist())


@pytest.mark.parametrize("nested", [True, False])
def test_json_flat_or_nested(served: tuple[Running, Mapping[str, tuple[str, Array]]], nested: bool) -> None:
    running, given = served
    inputs = [
        _tensor(name, kind, array, data=array.tolist() if nested and array.ndim else array.ravel().tolist())
        for name, (kind, array) in given.items()
    ]
    answer = httpx.post(f"{running.url}/v2/models/tiny/infer", json={"inputs": inputs}, timeout=60).json()
    _assert_same({one["name"]: (one["datatype"], one["shape"], one["data"]) for one in answer["outputs"]}, given)
    assert "id" not in answer


def test_raw_bytes_after_json(served: tuple[Running, Mapping[str, tuple[str, Array]]]) -> None:
    running, given = served
    raws = {name: to_raw(array, kind) for name, (kind, array) in given.items()}
    inputs = [
        _tensor(name, kind, array, parameters={"binary_data_size": len(raws[name])})
        for name, (kind, array) in given.items()
    ]
    head = json.dumps({"id": "7", "inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    response = httpx.post(
        f"{running.url}/v2/models/tiny/versions/1/infer",
        content=b"".join([head, *raws.values()]),
        headers={"inference-header-content-length": str(len(head)), "content-type": "application/octet-stream"},
        timeout=60,
    )
    place = int(response.headers["inference-header-content-length"])
    answer = json.loads(response.content[:place])
    assert (answer["id"], answer["model_version"]) == ("7", "1")
    assert {one["name"] for one in answer["outputs"]} == {f"{name}_out" for name in given}
    for one in answer["outputs"]:
        size = one["parameters"]["binary_data_size"]
        assert response.content[place : place + size] == raws[one["name"].removesuffix("_out")]
        place += size
    assert place == len(response.content)


def test_grpc_raw_contents(stub: Any, served: tuple[Running, Mapping[str, tuple[str, Array]]]) -> None:
    _, given = served
    raws = [to_raw(array, kind) for kind, array in given.values()]
    inputs = [_tensor(name, kind, array) for name, (kind, array) in given.items()]
    answer = stub.ModelInfer(
        pb.ModelInferRequest(model_name="tiny", inputs=inputs, raw_input_contents=raws), timeout=60
    )
    assert [output.name for output in answer.outputs] == [f"{name}_out" for name in given]
    assert list(answer.raw_output_contents) == raws


def test_grpc_typed_contents_where_the_type_has_them(
    stub: Any, served: tuple[Running, Mapping[str, tuple[str, Array]]]
) -> None:
    _, given = served
    if {kind for kind, _ in given.values()} - _CONTENTS.keys():
        request = pb.ModelInferRequest(model_name="tiny", inputs=[_tensor(n, k, a) for n, (k, a) in given.items()])
        with pytest.raises(grpc.RpcError, match="must be in raw_input_contents"):
            stub.ModelInfer(request, timeout=60)
        return
    inputs = []
    for name, (kind, array) in given.items():
        values = [text.encode() for text in array.ravel()] if kind == "BYTES" else array.ravel().tolist()
        inputs.append(_tensor(name, kind, array, contents={_CONTENTS[kind][0]: values}))
    answer = stub.ModelInfer(pb.ModelInferRequest(model_name="tiny", inputs=inputs), timeout=60)
    found = {}
    for one in answer.outputs:
        values = list(getattr(one.contents, _CONTENTS[one.datatype][0]))
        values = [value.decode() for value in values] if one.datatype == "BYTES" else values
        found[one.name] = (one.datatype, list(one.shape), values)
    _assert_same(found, given)
