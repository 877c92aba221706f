"""One version of one model: proven, with a batcher of its own; it reads, runs and writes what is asked of it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, ParamSpec, Protocol, TypeVar

from pipeline.contract.signature import TensorSpec
from serve.canary import Canary
from serve.errors import Headers
from serve.generate.model import Writer
from serve.metrics import Series
from serve.request_context import Watch
from serve.runtime.batcher import Array, Batcher, Pace, Rules, Seen, stays
from serve.runtime.predictor import Predictor
from serve.runtime.session import CPU
from serve.shadow import Mirror

_SPOKEN = "one input `instances`, BYTES [-1], is answered with one output `predictions`, BYTES [-1]"
PLATFORM = "onnx_onnxv1"  # the protocol's name for an ONNX model run by ONNX Runtime

Given = ParamSpec("Given")
Made = TypeVar("Made")


class Call(Protocol):
    """One request in its wire format."""

    @property
    def quick(self) -> bool:
        """Reading and writing it may happen on the event loop, whatever is in it."""
        ...

    @property
    def size(self) -> int:
        """Of its bytes, as a power of two: how long reading takes is learned by it."""
        ...

    @property
    def timeout_seconds(self) -> float:
        """How long the client waits, known once the call was read."""
        ...

    def key(self) -> str:
        """The id the client gave it; empty where it gave none."""
        ...

    def read(self, predictor: Predictor) -> tuple[Mapping[str, Array], Sequence[str]]:
        """The arrays, checked in full, and the names of the outputs that are asked for."""
        ...

    def write(self, predictor: Predictor, outputs: Mapping[str, Array], version: str) -> Any: ...


class ModelVersion:
    """One version of one model, which has answered its golden requests."""

    canary: Canary | None = None  # who answers a share of the requests that name no version
    mirror: Mirror | None = None  # who gets a copy of them

    def __init__(self, name: str, version: str, predictor: Predictor, pool: Executor) -> None:
        bundle = predictor.bundle
        self.name, self.version, self.bundle, self.predictor = name, version, bundle, predictor
        self.pool = pool
        self.max_body_bytes = bundle.signature.limits.max_body_bytes
        self.series = Series()
        self.batcher = Batcher(predictor.run, rules_of(predictor), pool, Seen(self.series.batch))
        self.headers: Headers = ((b"x-bundle-digest", bundle.digest.encode()),)
        self._deadline_seconds = bundle.signature.limits.deadline_seconds or math.inf
        self.writer = None if predictor.words is None else Writer(predictor.words, bundle, pool)
        self._reading = 0  # requests that a thread of the pool reads, or will
        self.coming = 0  # requests that the gate let in and the application has not begun with
        self._read_pace, self._write_pace = Pace(), Pace()

    def admit(self, timeout_seconds: float = math.inf) -> None:
        """Refuse what has no room or no hope before its body costs anything."""
        if timeout_seconds == math.inf:
            timeout_seconds = self._deadline_seconds
        self.batcher.admit(time.monotonic() + timeout_seconds, self._reading + self.coming)

    async def answer(
        self,
        call: Call,
        timeout_seconds: float = math.inf,
        gone: Callable[[], bool] = stays,
        watch: Watch | None = None,
        alone: bool = False,
    ) -> Any:
        """Read, run together with whoever asks at the same moment, write."""
        predictor, clock = self.predictor, time.monotonic
        watch = watch or Watch()
        watch.served, watch.reading = self, clock()
        quick = call.quick and predictor.spoken is None  # a codec is user code
        if quick:
            arrays, wanted = call.read(predictor)
        else:
            arrays, wanted = await self._read(call)
        watch.read = clock()
        deadline = watch.began + self.patience(timeout_seconds, call.timeout_seconds)
        outputs = await self.batcher.outputs(arrays, wanted, deadline, gone, watch, alone)
        watch.ran = clock()
        if quick:
            answer = call.write(predictor, outputs, self.version)
        else:
            answer = await self._off_loop(self._write_pace, call.size, call.write, predictor, outputs, self.version)
        watch.written = clock()
        if self.mirror is not None:
            self.mirror.offer(arrays, outputs)
        return answer

    async def _read(self, call: Call) -> tuple[Mapping[str, Array], Sequence[str]]:
        self._reading += 1
        try:
            return await self._off_loop(self._read_pace, call.size, call.read, self.predictor)
        finally:
            self._reading -= 1

    async def _off_loop(
        self, pace: Pace, size: int, work: Callable[Given, Made], *args: Given.args, **named: Given.kwargs
    ) -> Made:
        """In a thread: a codec is user code. Where one of this size is known to be quick, that would only cost."""
        if pace.quick(size):
            return _timed(pace, size, work, *args, **named)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.pool, lambda: _timed(pace, size, work, *args, **named))

    def patience(self, *said_seconds: float) -> float:
        """The shortest of what the client said in its ways; what the bundle says where it said nothing."""
        said = min(said_seconds)
        return self._deadline_seconds if said == math.inf else said

    def metadata(self, versions: Sequence[str]) -> dict[str, Any]:
        session = self.predictor.session
        return {
            "name": self.name,
            "versions": list(versions),
            "platform": PLATFORM,
            "inputs": [described(spec) for spec in self.bundle.signature.inputs],
            "outputs": [described(spec) for spec in self.bundle.signature.outputs],
            "properties": {
                "bundle": self.bundle.digest,
                "verdict": self.bundle.manifest.verdict,
                **({} if self.bundle.override is None else {"override": str(self.bundle.override)}),
                "variant": self.bundle.signature.variant,
                "provider": session.provider,
                "provider_fallback": session.fallback,
                "batching": f"off: {self.predictor.why_alone}" if self.predictor.why_alone else "on",
                **({} if self.writer is None else {"texts": self.writer.told}),
                **({} if self.predictor.spoken is None else {"instances": _SPOKEN}),
            },
        }


def rules_of(predictor: Predictor) -> Rules:
    runtime, limits = predictor.signature.runtime, predictor.signature.limits
    return Rules(
        mergeable=not predictor.why_alone,
        rows=runtime.batch_rows,
        waiting=limits.max_waiting,
        delay_seconds=runtime.batch_delay_ms / 1e3,
        computes=predictor.session.provider == CPU,
    )


def _timed(pace: Pace, size: int, work: Callable[Given, Made], *args: Given.args, **named: Given.kwargs) -> Made:
    began = time.perf_counter()
    made = work(*args, **named)
    pace.learn(size, 1, time.perf_counter() - began)
    return made


def described(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": spec.protocol_shape}
