from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import httpx
import pytest

from pipeline.contract.bundle import Bundle, Override
from pipeline.contract.signature import TensorSpec
from serve.model_version import ModelVersion
from serve.protocol import openapi

if TYPE_CHECKING:
    from tests.serve.conftest import Running


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/", {"status": "alive"}),
        ("/v1/models", {"models": ["tiny"]}),
        ("/v1/models/tiny", {"name": "tiny", "ready": True}),
        ("/v2/health/live", {"live": True}),
        ("/v2/health/ready", {"ready": True, "live": True}),
        ("/v2/models", {"models": ["tiny"]}),
        ("/v2/models/tiny/ready", {"name": "tiny", "ready": True}),
    ],
)
def test_health_and_lists_answer_as_the_protocols_require(
    client: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    response = client.get(path)
    assert (response.status_code, response.json()) == (200, body)


def test_metadata_names_the_tensors_and_how_the_model_runs(client: httpx.Client, bundle: Bundle) -> None:
    metadata = client.get("/v2/models/tiny").json()
    assert metadata["platform"] == "onnx_onnxv1"
    assert metadata["inputs"] == [{"name": "image", "datatype": "FP32", "shape": [-1, 1, 8, 8]}]
    assert metadata["outputs"] == [{"name": "logits", "datatype": "FP32", "shape": [-1, 10]}]
    assert metadata["properties"] == {
        "bundle": bundle.digest,
        "verdict": "pass",
        "variant": "fp32",
        "provider": "CPUExecutionProvider",
        "provider_fallback": "",
        "batching": "on",
    }
    assert client.get("/v2").json()["name"] == "pipe"


def test_metadata_names_who_overrode_the_gate_and_why(bundle: Bundle) -> None:
    given = Override(at="2026-01-02", by="ann@here", reason="shown on Monday", verdict="v")
    predictor = SimpleNamespace(
        session=SimpleNamespace(provider="CPU", fallback=""), unbatched_reason="", text_signature=None
    )
    version = SimpleNamespace(
        name="tiny", digest="", bundle=replace(bundle, override=given), predictor=predictor, generator=None
    )
    properties = ModelVersion.metadata(cast("ModelVersion", version), ["1"])["properties"]
    assert properties["override"] == "overridden by ann@here, 2026-01-02: shown on Monday"
    assert not properties.keys() & {"axes", "padding"}


def test_metadata_has_named_axes_and_the_effect_of_padding(bundle: Bundle) -> None:
    inputs = (TensorSpec(name="letters", datatype="INT64", shape=("batch", "time")),)
    outputs = (TensorSpec(name="tags", datatype="FP32", shape=("batch", "time // 2", 3)),)
    tagger = {"inputs": inputs, "outputs": outputs, "padding": "padding changes answers: 7 of 9"}
    changed = replace(bundle, signature=bundle.signature.model_copy(update=tagger))
    predictor = SimpleNamespace(
        session=SimpleNamespace(provider="CPU", fallback=""), unbatched_reason="", text_signature=None
    )
    version = SimpleNamespace(name="tiny", digest="", bundle=changed, predictor=predictor, generator=None)
    metadata = ModelVersion.metadata(cast("ModelVersion", version), ["1"])
    assert metadata["properties"]["axes"] == "letters [batch, time], tags [batch, time // 2, 3]"
    assert metadata["properties"]["padding"] == "padding changes answers: 7 of 9"
    assert metadata["outputs"][0]["shape"] == [-1, -1, 3]
    shape = openapi.infer_answer(changed.signature, "tiny", "1")["properties"]["outputs"]["items"]["anyOf"][0]
    assert shape["properties"]["shape"]["description"] == "[batch, time // 2, 3]"


def test_every_answer_names_the_bundle_and_the_process(
    client: httpx.Client, server: Running, bundle: Bundle, picture: list[Any]
) -> None:
    for response in (
        client.get("/"),
        client.get("/nowhere"),
        client.get("/metrics"),
        client.post("/v1/models/tiny:predict", json={"instances": [picture]}),
        client.post("/v1/models/tiny:predict", content=b"{"),
        client.post("/v1/models/tiny:predict", content=b" " * 100_001),
    ):
        assert response.headers["x-bundle-digest"] == bundle.digest
        assert response.headers["x-served-by"] == str(server.process.pid)


def test_internal_error_is_an_opaque_500_with_a_traceback_in_the_log(
    tricky_server: Running, picture: list[Any]
) -> None:
    body = {"instances": [{"image": picture, "fail": "encode"}]}
    response = httpx.post(f"{tricky_server.url}/v1/models/tiny:predict", json=body, timeout=60)
    assert response.status_code == 500
    assert response.json() == {"error": "internal error; the server's log has the details"}
    assert "x-bundle-digest" in response.headers
    tricky_server.wait_for("RuntimeError: a secret of the server")
    assert tricky_server.log.count("Traceback") == 1


def test_codec_error_on_a_payload_is_a_400(tricky_server: Running, picture: list[Any]) -> None:
    body = {"instances": [{"image": picture, "fail": "decode"}]}
    response = httpx.post(f"{tricky_server.url}/v1/models/tiny:predict", json=body, timeout=60)
    assert (response.status_code, response.json()["error"].partition(":")[0]) == (400, "instances")
    assert "secret" not in response.text


def test_form_content_type_of_curl_is_read_as_json(client: httpx.Client) -> None:
    body = json.dumps({"instances": [[[0.0] * 8] * 8]})
    headers = {"content-type": "application/x-www-form-urlencoded"}
    assert client.post("/v1/models/tiny:predict", content=body, headers=headers).status_code == 200
    assert client.post("/v1/models/tiny:predict", content="a=b", headers=headers).status_code == 400
