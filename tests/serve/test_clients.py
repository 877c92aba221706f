"""Unmodified clients of other projects: Triton's over HTTP and gRPC, and kserve's."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import numpy as np
import pytest
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig
from kserve.protocol.infer_type import RequestedOutput

from pipeline.contract.bundle import Bundle
from pipeline.contract.golden import difference
from pipeline.contract.signature import NUMPY_TYPES
from serve.runtime.session import Session
from tests.serve.identity_models import build

if TYPE_CHECKING:
    from tests.serve.conftest import Launcher, Running


CLIENT_CHECKS = Path(__file__).with_name("triton_client_checks.py")
EVERY: dict[str, tuple[str, list[int | str]]] = {
    kind.lower(): (kind, ["batch", 2]) for kind in NUMPY_TYPES if kind != "BF16"
}


@pytest.mark.parametrize("specs", [EVERY, {"b": ("BF16", ["batch", 2])}], ids=["every", "bf16"])
def test_all_calls_of_tritons_clients_get_right_answers(
    module_launcher: Launcher, tmp_path: Path, specs: dict[str, Any]
) -> None:
    running = module_launcher(build(tmp_path / "bundle", specs))
    argv = [sys.executable, str(CLIENT_CHECKS), f"127.0.0.1:{running.port}", f"127.0.0.1:{running.grpc_port}"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    received = json.loads(done.stdout)
    assert len(received) == 157
    assert {check: trouble for check, trouble in received.items() if trouble} == {}
    assert "Traceback" not in running.log


@pytest.fixture
def image() -> np.ndarray[Any, Any]:
    return np.random.default_rng(5).random((2, 1, 8, 8)).astype(np.float32)


def _request(image: np.ndarray[Any, Any], *, binary: bool, name: str = "image") -> InferRequest:
    tensor = InferInput(name, list(image.shape), "FP32")
    tensor.set_data_from_numpy(image, binary_data=binary)
    return InferRequest("tiny", [tensor], request_id="7", request_outputs=[RequestedOutput("logits")])


@pytest.mark.parametrize("binary", [True, False])
def test_kserves_rest_client_of_v2(server: Running, bundle: Bundle, image: np.ndarray[Any, Any], binary: bool) -> None:
    async def ask() -> Any:
        async with InferenceRESTClient(RESTConfig(protocol="v2")) as client:
            assert await client.is_server_live(server.url)
            assert await client.is_server_ready(server.url)
            assert await client.is_model_ready(server.url, "tiny")
            assert not await client.is_model_ready(server.url, "other")
            with pytest.raises(httpx.HTTPStatusError, match="unknown input 'picture'"):
                await client.infer(server.url, _request(image, binary=binary, name="picture"), model_name="tiny")
            return await client.infer(server.url, _request(image, binary=binary), model_name="tiny")

    answer = asyncio.run(ask())
    wanted = Session(bundle, "cpu", 1).run({"image": image})["logits"]
    assert (answer.id, answer.model_name) == ("7", "tiny")
    np.testing.assert_array_equal(answer.outputs[0].as_numpy(), wanted)


def test_kserves_rest_client_of_v1(server: Running, bundle: Bundle) -> None:
    golden = bundle.golden()

    async def ask() -> Any:
        async with InferenceRESTClient(RESTConfig(protocol="v1")) as client:
            assert await client.is_server_live(server.url)
            assert await client.is_model_ready(server.url, "tiny")
            with pytest.raises(httpx.HTTPStatusError, match="this service has no explainer"):
                await client.explain(server.url, "tiny", {"instances": golden.instances})
            return await client.infer(server.url, {"instances": golden.instances}, model_name="tiny")

    found = asyncio.run(ask())["predictions"]
    assert difference(golden.predictions, found, golden.rtol, golden.atol) is None


@pytest.mark.parametrize("binary", [True, False])
def test_kserves_grpc_client(server: Running, bundle: Bundle, image: np.ndarray[Any, Any], binary: bool) -> None:
    async def ask() -> Any:
        client = InferenceGRPCClient(f"127.0.0.1:{server.grpc_port}")
        try:
            assert await client.is_server_live()
            assert await client.is_server_ready()
            assert await client.is_model_ready("tiny")
            with pytest.raises(grpc.RpcError, match="unknown input 'picture'"):
                await client.infer(_request(image, binary=binary, name="picture"))
            return await client.infer(_request(image, binary=binary))
        finally:
            await client.close()

    answer = asyncio.run(ask())
    wanted = Session(bundle, "cpu", 1).run({"image": image})["logits"]
    assert (answer.id, answer.model_name) == ("7", "tiny")
    np.testing.assert_array_equal(answer.outputs[0].as_numpy(), wanted)
