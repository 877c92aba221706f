from __future__ import annotations

import asyncio
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.contract.bundle import open_bundle
from pipeline.contract.codec import Part
from pipeline.contract.signature import Limits, Runtime
from serve.errors import Busy, DeadlineExceeded
from serve.load_shedding import admit
from serve.model_version import ModelVersion
from serve.request_context import TIMEOUT_HEADER, RequestContext
from serve.runtime.batcher import BatchingOptions
from serve.runtime.loading import load_predictor
from tests.serve.special_models import mixing, slow

LIMITS = Limits(max_batch_size=16, max_body_bytes=1 << 20, max_waiting=5, deadline_seconds=7)
RUNTIME = Runtime(provider="cpu", threads=1, batch_rows=9, batch_delay_ms=3)


@dataclass
class SlowPayload:
    """A payload whose codec takes some time."""

    timeout_seconds: float = math.inf
    is_quick: bool = False
    uses_codec: bool = False
    seconds: float = 0.0  # taken by its codec
    thread: str = ""  # that decoded it last

    def request_id(self) -> str:
        return ""

    def decode(self, predictor: Any) -> Any:
        self.thread = threading.current_thread().name
        time.sleep(self.seconds)
        return [Part((0,), {"x": np.zeros((1, 1), np.float32)})], ("y",)

    def encode(self, predictor: Any, outputs: Any, version: str) -> Any:
        return outputs[0]["y"].tolist()


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> ModelVersion:
    predictor = load_predictor(
        open_bundle(slow(tmp_path_factory.mktemp("slow") / "bundle", LIMITS, RUNTIME)), None, None
    )
    with ThreadPoolExecutor(2) as pool:
        return ModelVersion("tiny", "1", predictor, pool)


def test_requests_are_batched_as_the_bundle_requires(version: ModelVersion) -> None:
    assert version.batcher.options == BatchingOptions(
        mergeable=True, max_rows=9, max_waiting=5, delay_seconds=0.003, cpu_bound=True
    )
    assert version.metadata(["1"])["properties"]["batching"] == "on"


def test_model_that_mixes_rows_is_not_batched(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        found = ModelVersion("tiny", "1", load_predictor(open_bundle(mixing(tmp_path / "bundle")), None, None), pool)
    assert not found.batcher.options.mergeable
    assert found.metadata(["1"])["properties"]["batching"].startswith("off: a golden request gets another answer")


@pytest.mark.parametrize(
    ("header", "parameter", "seconds"),
    [(None, math.inf, 7), (b"2", math.inf, 2), (None, 3, 3), (b"2", 3, 2), (b"60", math.inf, 60), (b"60", 50, 50)],
)
def test_shortest_timeout_of_client_wins_over_that_of_bundle(
    version: ModelVersion, header: bytes | None, parameter: float, seconds: float
) -> None:
    request = RequestContext({} if header is None else {TIMEOUT_HEADER: header}, "/")
    admit(request, version)

    async def predict() -> Any:
        with ThreadPoolExecutor(1) as pool:
            fresh = ModelVersion("tiny", "1", version.predictor, pool)
            return await fresh.predict(request, SlowPayload(timeout_seconds=parameter))

    assert asyncio.run(predict()) == [[1.0]]
    assert request.deadline == pytest.approx(request.received_at + seconds)


def test_expired_request_is_refused_before_its_body_is_read(version: ModelVersion) -> None:
    late = RequestContext({TIMEOUT_HEADER: b"1"}, "/")
    late.received_at -= 1
    with pytest.raises(DeadlineExceeded):
        admit(late, version)
    admit(RequestContext({}, "/"), version)
    admit(RequestContext({TIMEOUT_HEADER: b"1"}, "/"), version)


def test_deadline_ends_a_request_that_is_decoded(version: ModelVersion) -> None:
    gate = threading.Event()

    class Stuck(SlowPayload):
        def decode(self, predictor: Any) -> Any:
            assert gate.wait(60)
            return super().decode(predictor)

    async def predict() -> None:
        with ThreadPoolExecutor(1) as pool:
            fresh = ModelVersion("tiny", "1", version.predictor, pool)
            requests = [RequestContext({}, "/") for _ in range(2)]  # the second one waits for the thread
            for request in requests:
                request.deadline = time.monotonic() + 0.02
            answers = await asyncio.gather(
                *(fresh.predict(request, Stuck()) for request in requests), return_exceptions=True
            )
            assert [str(each) for each in answers] == [
                "the deadline passed while the request was decoded; it was not computed"
            ] * 2
            assert all(isinstance(each, DeadlineExceeded) for each in answers)
            gate.set()
            assert await fresh.predict(RequestContext({}, "/"), SlowPayload()) == [[1.0]]

    asyncio.run(predict())


@pytest.mark.parametrize("quick", [True, False])
def test_request_is_decoded_run_and_encoded(version: ModelVersion, quick: bool) -> None:
    async def predict() -> Any:
        with ThreadPoolExecutor(2) as pool:
            fresh = ModelVersion("tiny", "1", version.predictor, pool)
            return await fresh.predict(RequestContext({}, "/"), SlowPayload(is_quick=quick))

    assert asyncio.run(predict()) == [[1.0]]


@pytest.mark.parametrize("place", ["unstarted", "decoding"])
def test_requests_on_their_way_to_the_queue_count_as_waiting(version: ModelVersion, place: str) -> None:
    """Otherwise any number of them could be let in before the first is in the queue."""
    setattr(version, place, LIMITS.max_waiting)
    try:
        with pytest.raises(Busy, match="5 requests wait already"):
            admit(RequestContext({}, "/"), version)
    finally:
        setattr(version, place, 0)
    admit(RequestContext({}, "/"), version)


def test_quick_codec_runs_on_the_loop_until_it_blocks(version: ModelVersion) -> None:
    main = threading.current_thread().name

    async def ask() -> None:
        with ThreadPoolExecutor(2) as pool:
            fresh = ModelVersion("tiny", "1", version.predictor, pool)

            async def on_the_loop(seconds: float = 0.0, size: int = 16) -> bool:
                request, payload = RequestContext({}, "/"), SlowPayload(seconds=seconds)
                request.size = size
                await fresh.predict(request, payload)
                return payload.thread == main

            assert not await on_the_loop()
            while not await on_the_loop():  # a busy machine may delay the first
                pass
            while await on_the_loop(0.06):  # once, unless the machine was busy again
                pass
            assert not any([await on_the_loop() for _ in range(5)])
            assert not await on_the_loop(size=1 << 20)  # no run of this size was measured

    asyncio.run(asyncio.wait_for(ask(), 300))
