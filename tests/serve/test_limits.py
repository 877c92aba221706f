"""The price list: what a body may cost, its address, and what is decoded apart from inference."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import json
import math
import subprocess
import sys
import threading
import weakref
from concurrent.futures import Executor
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.contract.bundle import Bundle
from pipeline.contract.signature import Limits, Runtime, Signature, TensorSpec
from serve import limits
from serve.errors import Busy, RequestError, TooLarge, TooManyRefused
from serve.limits import SMALL_BYTES, BodyLimits, BodyPrice, Budget, body_limits, json_memory
from serve.model_version import ModelVersion
from serve.protocol import v1
from serve.request_context import RequestContext
from serve.runtime.loading import load_predictor

IMAGE = TensorSpec(name="image", datatype="FP32", shape=("batch", 3, 224, 224))
ROW = TensorSpec(name="row", datatype="FP32", shape=("batch", 4))


def signature(spec: TensorSpec) -> Signature:
    most = Limits(max_batch_size=8, max_body_bytes=64 << 20)
    return Signature(inputs=(spec,), outputs=(ROW,), codec="Codec", limits=most, runtime=Runtime())


def request(address: str = "a", work: int = 0) -> Any:
    return SimpleNamespace(held_bytes=0, work=work, address=address)


def price(text: bytes, body: BodyLimits, json_bytes: float = math.inf, sent: float = math.inf) -> None:
    BodyPrice(request(), body, Budget(1 << 40), json_bytes).add(text, sent)


@pytest.mark.parametrize("item", [b"[],", b"{},", b"1,", b'{"a":[]},'])
def test_a_body_of_far_more_values_than_the_model_takes_is_refused(item: bytes) -> None:
    most = body_limits(signature(ROW), 0)
    price(item * 16_000, most)
    with pytest.raises(TooLarge, match="more numbers, lists and objects than the model takes"):
        price(item * 200_000, most)


def test_as_many_rows_as_the_model_takes_fit() -> None:
    image = b"[" + b"[" * 224 + b"0.25," * (3 * 224 * 224)
    price(image * 8, body_limits(signature(IMAGE), 0))


def test_instances_that_are_larger_than_tensors_have_room_by_their_example() -> None:
    """A codec may take less from an instance than it holds: the last of a long series, or a smaller image."""
    series = json.dumps([[0.5] * 40_000]).encode()
    with pytest.raises(TooLarge):
        price(series * 8, body_limits(signature(ROW), 0))
    price(series * 8, body_limits(signature(ROW), json_memory(series) / 2))


def test_files_and_raw_tensors_are_no_json() -> None:
    gray = b"{" * (4 << 20)
    with pytest.raises(TooLarge):
        price(gray, body_limits(signature(ROW), 0))
    price(gray, body_limits(signature(ROW), 0), json_bytes=0)
    price(b"[1]" + gray, body_limits(signature(ROW), 0), json_bytes=3)


def test_a_compressed_body_becomes_a_thousand_times_as_many_bytes_of_objects_at_most() -> None:
    text = b"0," * 400_000
    price(text, body_limits(signature(IMAGE), 0), sent=len(gzip.compress(text)) * 20)
    with pytest.raises(TooLarge):
        price(text, body_limits(signature(IMAGE), 0), sent=len(gzip.compress(text)))


def test_an_address_whose_large_bodies_are_refused_waits_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=lambda: now[0]))
    budget = Budget()
    for error in (None, Busy("later"), RequestError("404")):
        budget.charge_refused(request("a", 0), error)
    for size in (1 << 30, 256 << 20):
        budget.check_address(request("a"))
        budget.charge_refused(request("a", size), TooLarge("a body"))
    with pytest.raises(TooManyRefused, match="small ones without compression are answered") as caught:
        budget.check_address(request("a"))
    assert (caught.value.status, caught.value.headers) == (429, ((b"retry-after", b"4"),))
    budget.check_address(request("b"))
    now[0] = 5.0
    budget.check_address(request("a"))


def test_addresses_are_remembered_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=lambda: 0.0))
    budget = Budget()
    for number in range(3 * limits._MAX_ADDRESSES):
        budget.charge_refused(request(str(number), 2 << 30), TooLarge("a body"))
    assert len(budget._refused) == limits._MAX_ADDRESSES


def test_memory_goes_back_to_the_system_after_large_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    returned: list[int] = []
    monkeypatch.setattr(limits, "return_memory", lambda: returned.append(1))
    budget, large, small = Budget(threads=1), request(), request()
    budget.reserve(large, 80 << 20)
    budget.reserve(small, 1 << 20)
    budget.release(large)
    budget.release(small)
    budget.decoders.shutdown()
    assert returned == [1]
    budget.reserve(large, 80 << 20)
    budget.release(large)  # the service has ended


@pytest.mark.skipif(sys.platform != "linux", reason="other systems take memory back on their own")
def test_memory_that_is_free_is_given_back() -> None:
    """The last block is in use, so that glibc keeps all before it."""
    code = (
        "from serve import limits\n"
        "blocks = [bytes(1000) for _ in range(100_000)]\n"
        "full, last = limits.resident_memory(), blocks.pop()\n"
        "del blocks\n"
        "limits.return_memory()\n"
        "print(full - limits.resident_memory())\n"
    )
    freed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(freed) > 80_000_000


def test_parsers_take_turns_with_the_event_loop() -> None:
    """Each holds the interpreter: several at once would leave the event loop little of it."""

    async def run() -> None:
        budget, running, most, turns = Budget(threads=4), [0], [0], [0]
        first_runs, gate = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def parser(number: int) -> tuple[int, int]:
            running[0] += 1
            most[0] = max(most[0], running[0])
            if not number:
                loop.call_soon_threadsafe(first_runs.set)
                assert gate.wait(60)
            running[0] -= 1
            return number, turns[0]

        async def count_turns() -> None:
            while True:
                turns[0] += 1
                await asyncio.sleep(0)

        parsing = [asyncio.create_task(budget.parse(math.inf, parser, number)) for number in range(4)]
        await first_runs.wait()
        parsing.pop(0).cancel()  # its client has gone, and its parser runs on
        counting = asyncio.create_task(count_turns())
        await asyncio.sleep(0.01)
        gate.set()
        found = await asyncio.gather(*parsing)
        counting.cancel()
        budget.decoders.shutdown()
        assert [number for number, _ in found] == [1, 2, 3]
        assert most == [1]
        assert len({turn for _, turn in found}) == 3, "the event loop had a turn between any two"

    asyncio.run(run())


def test_a_refused_body_is_freed_without_the_garbage_collector() -> None:
    """It runs rarely; each body of 16 MB that was refused would wait for it."""

    class Body:
        """Bytes cannot be watched."""

    def refuse(body: Body) -> None:
        raise TooLarge("a body")

    async def run() -> None:
        budget, body = Budget(threads=1), Body()
        watched = weakref.ref(body)
        with contextlib.suppress(TooLarge):
            await budget.parse(math.inf, refuse, body)
        del body
        await asyncio.sleep(0)
        assert watched() is None
        budget.decoders.shutdown()

    gc.disable()
    try:
        asyncio.run(run())
    finally:
        gc.enable()


def test_codecs_do_not_wait_for_one_another(bundle: Bundle, pool: Executor) -> None:
    """They are user code, which may wait for anything."""
    meeting = threading.Barrier(2)

    class Payload(v1.Payload):
        def decode(self, predictor: Any) -> Any:
            meeting.wait(60)
            return super().decode(predictor)

    async def run() -> None:
        version = ModelVersion("tiny", "1", load_predictor(bundle, "cpu", 1), pool)
        body = json.dumps({"instances": bundle.golden().instances}).encode() + b" " * SMALL_BYTES
        requests = [RequestContext({}, "/") for _ in range(2)]
        for one in requests:
            one.size = len(body)
        answers = await asyncio.gather(*(version.predict(one, Payload(body)) for one in requests))
        assert all(b"predictions" in answer for answer in answers)

    asyncio.run(run())


def test_decoding_does_not_wait_for_inference(bundle: Bundle, pool: Executor) -> None:
    """All threads of inference are taken: a body is decoded all the same."""

    async def run() -> None:
        gate, version = asyncio.Event(), ModelVersion("tiny", "1", load_predictor(bundle, "cpu", 1), pool)
        loop = asyncio.get_running_loop()

        class Payload(v1.Payload):
            def decode(self, predictor: Any) -> Any:
                found = super().decode(predictor)
                loop.call_soon_threadsafe(gate.set)
                return found

        blocked = threading.Event()
        for _ in range(4):
            pool.submit(blocked.wait)
        body = json.dumps({"instances": bundle.golden().instances}).encode()
        task = asyncio.create_task(version.predict(RequestContext({}, "/"), Payload(body)))
        try:
            async with asyncio.timeout(60):
                await gate.wait()
        finally:
            blocked.set()
        assert b"predictions" in await task

    asyncio.run(run())
