from __future__ import annotations

import asyncio
import json
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import pytest

from pipeline.contract.bundle import open_bundle
from serve.app import App
from serve.grpc.open_inference import message_class
from serve.grpc.service import Servicer
from serve.model_version import Canary, ModelVersion, id_position
from serve.models import Model, ModelRepository
from serve.monitoring.request_log import RequestLog
from serve.monitoring.snapshot import Metrics
from serve.protocol import v1, v2
from serve.request_context import RequestContext
from serve.runtime.loading import load_predictor
from tests.serve.wire.http1.fakes import connect
from tests.serve.wire.transport import FakeTransport

INSTANCES = b'{"instances": []}'
IDS = [f"request-{number}".encode() for number in range(4000)]


@pytest.fixture
def model(bundle_path: Path, other_path: Path, pool: Executor) -> Model:
    """The digits bundle, and another one as a canary with a tenth of the requests."""
    model = Model("tiny")
    for path in (bundle_path, other_path):
        model.add(load_predictor(open_bundle(path), "cpu", 1), pool, canary_share=0.1)
    return model


def _chosen(model: Model, payload: v1.Payload | v2.Payload, request_id: bytes = b"") -> ModelVersion:
    return asyncio.run(model.current.choose(payload, request_id))


def test_ids_are_spread_evenly_and_positions_never_change() -> None:
    places = [id_position("a" * 64, key) for key in IDS]
    assert all(0 <= place < 1 for place in places)
    for tenth in range(10):
        assert 300 < sum(tenth / 10 <= place < (tenth + 1) / 10 for place in places) < 500
    assert id_position("a" * 64, b"request-1") == pytest.approx(0.82437569, abs=1e-8), "the same in every process"


def test_another_candidate_gets_other_ids(model: Model) -> None:
    canaries = [Canary(version, 0.1) for version in model.versions.values()]
    first, second = ({key for key in IDS if canary.takes(key)} for canary in canaries)
    assert len(first & second) < 0.3 * len(first)


def test_larger_share_keeps_the_ids_of_a_smaller_one(model: Model) -> None:
    assert model.current.canary is not None
    small, large = Canary(model.current.canary.candidate, 0.1), Canary(model.current.canary.candidate, 0.2)
    assert {key for key in IDS if small.takes(key)} < {key for key in IDS if large.takes(key)}


def test_id_in_the_body_takes_precedence_over_the_header(model: Model) -> None:
    assert model.current.canary is not None
    taken = next(key for key in IDS if model.current.canary.takes(key))
    left = next(key for key in IDS if not model.current.canary.takes(key))

    def call(key: bytes) -> v2.Payload:
        return v2.Payload("tiny", b'{"id": "%s", "inputs": []}' % key, None, None)

    assert _chosen(model, call(taken), left) is model.current.canary.candidate
    assert _chosen(model, call(left), taken) is model.current
    assert _chosen(model, call(b""), taken) is model.current.canary.candidate
    assert _chosen(model, v1.Payload(INSTANCES), taken) is model.current.canary.candidate
    assert _chosen(model, v1.Payload(INSTANCES), left) is model.current


def test_id_is_read_from_a_long_body_too(model: Model) -> None:
    assert model.current.canary is not None
    taken = next(key for key in IDS if model.current.canary.takes(key))
    long = v2.Payload("tiny", b'{"id": "%s", "inputs": []%s}' % (taken, b" " * 2_000_000), None, None)
    assert not long.is_quick
    assert _chosen(model, long) is model.current.canary.candidate


def test_without_a_canary_the_current_version_gets_all_requests(model: Model) -> None:
    model.current.canary = None
    assert {_chosen(model, v1.Payload(b"{}"), key) for key in IDS[:50]} == {model.current}


TENSOR = {"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32"}


@pytest.mark.parametrize("protocol", ["v1", "v2", "grpc"])
def test_request_that_names_a_version_gets_it_whatever_its_id(
    model: Model, picture: list[list[int]], protocol: str
) -> None:
    assert model.current.canary is not None
    repository, taken = ModelRepository(), next(key for key in IDS if model.current.canary.takes(key))
    repository.add(model)
    requests = RequestLog(Metrics(list))

    async def http(path: str, body: Any) -> None:
        transport, data = FakeTransport(), json.dumps(body).encode()
        head = (
            f"POST /{path} HTTP/1.1\r\nhost: x\r\nx-request-id: {taken.decode()}\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        connect(App(repository, requests), transport).data_received(head.encode() + data)
        while not transport.statuses:
            await asyncio.sleep(0)
        assert transport.statuses == [200]
        assert b"x-bundle-digest: %b" % model.versions["1"].digest.encode() in transport.written

    async def grpc() -> None:
        message = message_class("ModelInferRequest")(model_name="tiny", model_version="1", id=taken.decode())
        message.inputs.add(**TENSOR).contents.fp32_contents.extend([0.5] * 64)
        answer = await Servicer(repository, requests).ModelInfer(message, RequestContext({}, ""))  # type: ignore[arg-type]
        assert answer.model_version == "1"

    if protocol == "v1":
        asyncio.run(http("v1/models/tiny/versions/1:predict", {"instances": [picture]}))
    elif protocol == "v2":
        body = {"id": taken.decode(), "inputs": [{**TENSOR, "data": [0.5] * 64}]}
        asyncio.run(http("v2/models/tiny/versions/1/infer", body))
    else:
        asyncio.run(grpc())
