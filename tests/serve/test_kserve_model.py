"""A bundle in kserve's own ModelServer, tested with kserve's own clients over V1, V2 and gRPC."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from kserve import InferenceGRPCClient, InferInput, InferRequest

from pipeline.contract.bundle import Bundle, open_bundle
from pipeline.contract.golden import difference
from pipeline.system.errors import BundleError
from serve.kserve_model import BundleModel
from tests.ports import free_port
from tests.serve.identity_models import build

from ..e2e.project_folder import wait_for


@pytest.fixture(scope="module")
def ports(bundle_path: Path) -> Iterator[tuple[int, int]]:
    """The HTTP and gRPC ports of a running server."""
    http, rpc = free_port(), free_port()
    argv = [sys.executable, "-W", "ignore", "-m", "serve.kserve_model", str(bundle_path)]
    options = ["--http_port", str(http), "--grpc_port", str(rpc)]
    process = subprocess.Popen([*argv, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: process.poll() is not None or _is_ready(http))
        yield http, rpc
    finally:
        process.terminate()
        process.wait(300)


def _is_ready(port: int) -> bool:
    try:
        return bool(httpx.get(f"http://127.0.0.1:{port}/v2/health/ready").json()["ready"])
    except httpx.TransportError:
        return False


def _tensor(array: np.ndarray[Any, Any], *, binary: bool = True) -> InferInput:
    tensor = InferInput("image", list(array.shape), "FP32")
    tensor.set_data_from_numpy(array, binary_data=binary)
    return tensor


def test_v1_answers_the_golden_instances(ports: tuple[int, int], bundle: Bundle) -> None:
    golden, url = bundle.golden(), f"http://127.0.0.1:{ports[0]}/v1/models/{bundle.name}:predict"
    answer = httpx.post(url, json={"instances": golden.instances}).json()["predictions"]
    assert difference(golden.predictions, answer, golden.rtol, golden.atol) is None
    for body in ({"instances": [[["no picture"]]]}, {"instances": "text"}, {}):
        assert httpx.post(url, json=body).status_code == 400


@pytest.mark.parametrize("binary", [True, False])
def test_v2_answers_the_golden_inputs(ports: tuple[int, int], bundle: Bundle, *, binary: bool) -> None:
    golden, url = bundle.golden(), f"http://127.0.0.1:{ports[0]}/v2/models/{bundle.name}"
    request = InferRequest(bundle.name, [_tensor(golden.inputs["image"], binary=binary)])
    body, json_size = request.to_rest()
    headers = {"inference-header-content-length": str(json_size)} if binary else {}
    answer = httpx.post(f"{url}/infer", headers=headers, **({"content": body} if binary else {"json": body})).json()
    (logits,) = answer["outputs"]
    expected = golden.outputs["logits"]
    assert (logits["name"], logits["datatype"], tuple(logits["shape"])) == ("logits", "FP32", expected.shape)
    np.testing.assert_allclose(np.reshape(logits["data"], expected.shape), expected, golden.rtol, golden.atol)
    assert httpx.get(url).json()["inputs"] == [{"name": "image", "datatype": "FP32", "shape": [-1, 1, 8, 8]}]


def test_grpc_answers_the_golden_inputs_and_names_a_mistake(ports: tuple[int, int], bundle: Bundle) -> None:
    golden = bundle.golden()

    async def ask() -> Any:
        client = InferenceGRPCClient(f"127.0.0.1:{ports[1]}")
        try:
            with pytest.raises(grpc.RpcError, match=r"image: shape \[1, 2\]"):
                await client.infer(InferRequest(bundle.name, [_tensor(np.zeros((1, 2), np.float32))]))
            return await client.infer(InferRequest(bundle.name, [_tensor(golden.inputs["image"])]))
        finally:
            await client.close()

    answer = asyncio.run(ask()).outputs[0].as_numpy()
    np.testing.assert_allclose(answer, golden.outputs["logits"], golden.rtol, golden.atol)


def test_a_datatype_that_kserve_lacks_is_named_at_the_start(tmp_path: Path) -> None:
    path = build(tmp_path / "bundle", {"b": ("BF16", ["batch", 2])})
    with pytest.raises(BundleError, match="b is BF16, which kserve lacks"):
        BundleModel("b", open_bundle(path)).load()
