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
from pipeline.contract.signature import Limits, Runtime
from serve.errors import Busy, Expired
from serve.loading import prove
from serve.model_version import ModelVersion
from serve.runtime.batcher import Rules
from tests.serve.odd import mixing, slow

LIMITS = Limits(max_batch_size=16, max_body_bytes=1 << 20, max_waiting=5, deadline_seconds=7)
RUNTIME = Runtime(provider="cpu", threads=1, batch_rows=9, batch_delay_ms=3)


@dataclass
class Asked:
    """A request whose client said how long it waits, by the protocol's own word."""

    timeout_seconds: float = math.inf
    quick: bool = False
    size: int = 5
    seconds: float = 0.0  # that its codec takes
    thread: str = ""  # that read it last

    def key(self) -> str:
        return ""

    def read(self, predictor: Any) -> Any:
        self.thread = threading.current_thread().name
        time.sleep(self.seconds)
        return {"x": np.zeros((1, 1), np.float32)}, ("y",)

    def write(self, predictor: Any, outputs: Any, version: str) -> Any:
        return outputs["y"].tolist()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ModelVersion:
    predictor = prove(open_bundle(slow(tmp_path_factory.mktemp("slow") / "bundle", LIMITS, RUNTIME)), None, None)
    with ThreadPoolExecutor(2) as pool:
        return ModelVersion("tiny", "1", predictor, pool)


def test_requests_are_merged_as_the_bundle_says(served: ModelVersion) -> None:
    assert served.batcher.rules == Rules(mergeable=True, rows=9, waiting=5, delay_seconds=0.003, computes=True)
    assert served.metadata(["1"])["properties"]["batching"] == "on"


def test_a_model_that_mixes_rows_is_asked_one_request_at_a_time(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        found = ModelVersion("tiny", "1", prove(open_bundle(mixing(tmp_path / "bundle")), None, None), pool)
    assert not found.batcher.rules.mergeable
    assert found.metadata(["1"])["properties"]["batching"].startswith("off: a golden request is answered otherwise")


@pytest.mark.parametrize(
    ("header", "parameter", "seconds"),
    [(math.inf, math.inf, 7), (2, math.inf, 2), (math.inf, 3, 3), (2, 3, 2), (60, math.inf, 60), (60, 50, 50)],
)
def test_the_shortest_that_a_client_says_holds_and_else_what_the_bundle_says(
    served: ModelVersion, header: float, parameter: float, seconds: float
) -> None:
    assert served.patience(header, parameter) == seconds


def test_what_has_no_time_left_is_refused_before_its_body_is_read(served: ModelVersion) -> None:
    with pytest.raises(Expired):
        served.admit(0.0)
    served.admit()
    served.admit(1.0)


@pytest.mark.parametrize("quick", [True, False])
def test_a_request_is_read_run_and_written(tmp_path: Path, quick: bool) -> None:
    async def ask() -> Any:
        with ThreadPoolExecutor(2) as pool:
            return await ModelVersion(
                "tiny", "1", prove(open_bundle(slow(tmp_path / "bundle")), None, None), pool
            ).answer(Asked(quick=quick))

    assert asyncio.run(ask()) == [[1.0]]


def test_requests_that_are_still_being_read_count_as_waiting(served: ModelVersion) -> None:
    """Else as many as there are could queue before the threads that read them."""
    served._reading = LIMITS.max_waiting
    try:
        with pytest.raises(Busy, match="5 requests wait already"):
            served.admit()
    finally:
        served._reading = 0
    served.admit()


def test_a_codec_that_is_known_to_be_quick_is_spared_the_way_to_a_thread_until_it_blocks(tmp_path: Path) -> None:
    main = threading.current_thread().name

    async def ask() -> None:
        with ThreadPoolExecutor(2) as pool:
            served = ModelVersion("tiny", "1", prove(open_bundle(slow(tmp_path / "bundle")), None, None), pool)

            async def on_the_loop(seconds: float = 0.0, size: int = 5) -> bool:
                await served.answer(call := Asked(seconds=seconds, size=size))
                return call.thread == main

            assert not await on_the_loop()
            while not await on_the_loop():  # a busy machine may hold up the first
                pass
            while await on_the_loop(0.06):  # once, unless the machine was busy again
                pass
            assert not any([await on_the_loop() for _ in range(5)])
            assert not await on_the_loop(size=20)  # of this size nothing is known

    asyncio.run(asyncio.wait_for(ask(), 60))
