"""One version of one model: a verified bundle with its own queue, which decodes, runs and encodes predictions.

A canary is a candidate version beside the current one, with a share of the requests that name no version.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

from pipeline.contract.codec import Array, Part
from pipeline.contract.signature import TensorSpec
from serve.errors import DeadlineExceeded, Headers
from serve.limits import DECODE_SECONDS, Budget, answer_row_memory, body_limits, json_memory, largest_request
from serve.monitoring.metrics import ModelMetrics
from serve.protocol.examples import request_examples
from serve.protocol.validate import format_shape
from serve.request_context import RequestContext, in_flight
from serve.runtime.batcher import Batcher, BatchingOptions, RunTimeEstimate
from serve.runtime.predictor import Predictor
from serve.runtime.session import CPU
from serve.sampling import Sampler
from serve.shadow import Shadow

_TEXT_TENSORS = "one input `instances`, BYTES [-1], is answered with one output `predictions`, BYTES [-1]"
_UNCOUNTED_ROW_BYTES = 1 << 10  # of an answer, as rows of the request take more
_QUICK_SECONDS = 1e-3  # of decoding; it keeps Python's other threads waiting wherever it runs
_MISSING = "a missing number is null in JSON, and NaN in raw and typed data"
PLATFORM = "onnx_onnxv1"  # the protocol's name for an ONNX model run by ONNX Runtime


class Payload(Protocol):
    """The body of a prediction in its wire format."""

    is_quick: bool  # to decode, and then to encode: quick enough for the event loop, without measuring it
    uses_codec: bool  # of any model; it is user code, which may block

    @property
    def timeout_seconds(self) -> float:
        """The timeout in the body, valid once it is decoded."""

    def request_id(self) -> str:
        """Parse the body, and return the id in it, empty if there is none."""

    def decode(self, predictor: Predictor) -> tuple[Sequence[Part], Sequence[str]]:
        """Return the checked input arrays and the names of the requested outputs."""

    def encode(self, predictor: Predictor, outputs: Sequence[Mapping[str, Array]], version: str) -> Any:
        """Return the answer from the outputs of each part."""


class ModelVersion:
    """A version that has answered its golden requests."""

    canary: Canary | None = None
    shadow: Shadow | None = None  # gets copies of requests; its responses are dropped
    sampler: Sampler | None = None  # gets copies of requests and answers, of all versions

    def __init__(
        self, name: str, version: str, predictor: Predictor, pool: Executor, budget: Budget | None = None
    ) -> None:
        bundle, limits = predictor.bundle, predictor.signature.limits
        self.name, self.version, self.bundle, self.predictor = name, version, bundle, predictor
        self._budget = budget or Budget()
        self.digest = bundle.digest
        self.created = int(time.time())
        self.headers: Headers = ((b"x-bundle-digest", bundle.digest.encode()),)
        instances = bundle.golden().instances or [None]
        example_bytes = json_memory(json.dumps(instances).encode()) / len(instances)
        self.predict_limits = body_limits(predictor.signature, example_bytes)
        most = self.predict_limits.size if predictor.text_signature else largest_request(predictor.signature)
        self.infer_limits = self.predict_limits._replace(size=int(min(self.predict_limits.size, most)))
        self._answer_row_bytes = answer_row_memory(predictor.signature)
        self.default_timeout_seconds = limits.deadline_seconds or math.inf
        self.metrics = ModelMetrics()
        self.batcher = Batcher(predictor.session.run, batching_options(predictor), pool, self.metrics.record_batch)
        model = predictor.language_model
        self.generator = None if model is None else model.open(bundle, pool)
        # Requests that are admitted and not in the queue of the batcher yet:
        self.unstarted = 0  # no task has begun with them
        self.decoding = 0  # their codec runs, or waits for a thread
        self._decode_pace, self._encode_pace = RunTimeEstimate(_QUICK_SECONDS), RunTimeEstimate(_QUICK_SECONDS)

    @property
    def openai_kinds(self) -> frozenset[str]:
        """Return the routes of OpenAI's API that this model answers."""
        texts = () if self.generator is None else ("completions", "chat")
        return frozenset((*texts, *(() if self.predictor.embedding_sizes is None else ("embeddings",))))

    @cached_property
    def examples(self) -> dict[str, Any]:
        """Return an example of a request for each route that has one, from the files of the bundle."""
        return request_examples(self.bundle)

    async def predict(self, request: RequestContext, payload: Payload) -> Any:
        """Decode an admitted request, run it together with those that arrive at the same moment, and encode."""
        predictor, budget, clock = self.predictor, self._budget, time.monotonic
        request.model_version, request.decode_started_at = self, clock()
        size = request.size.bit_length()
        uses_codec = payload.uses_codec or predictor.text_signature is not None
        if payload.is_quick and not uses_codec:
            parts, output_names = payload.decode(predictor)
        else:
            seconds = min(request.deadline - clock(), DECODE_SECONDS)
            self.decoding += 1
            try:
                async with asyncio.timeout(seconds):
                    run: Callable[..., Awaitable[Any]] = partial(budget.parse, math.inf)
                    if uses_codec:
                        await budget.parse(request.size, payload.request_id)
                        run = budget.submit
                    parts, output_names = await self._decode_pace.call(run, size, payload.decode, predictor)
            except TimeoutError:
                passed = "the deadline passed" if clock() >= request.deadline else f"{DECODE_SECONDS:.0f} s passed"
                raise DeadlineExceeded(f"{passed} while the request was decoded; it was not computed") from None
            finally:
                self.decoding -= 1
        request.decoded_at = clock()
        if self._answer_row_bytes > _UNCOUNTED_ROW_BYTES:
            rows = sum(len(array) for part in parts for array in list(part.arrays.values())[:1])
            budget.reserve(request, rows * self._answer_row_bytes)
        if (timeout := min(payload.timeout_seconds, request.timeout_seconds)) < math.inf:
            request.deadline = request.received_at + timeout
        alone = in_flight.count == 1
        outputs, started_at = [], 0.0
        for part in parts:  # one, unless padding changes answers
            outputs.append(await self.batcher.outputs(part.arrays, output_names, request, is_only=alone))
            started_at = started_at or request.run_started_at  # set by the batcher
        request.run_started_at, request.run_ended_at = started_at, clock()
        if payload.is_quick and not uses_codec:
            answer = payload.encode(predictor, outputs, self.version)
        else:
            answer = await self._encode_pace.call(budget.submit, size, payload.encode, predictor, outputs, self.version)
        request.encoded_at = clock()
        if self.shadow is not None or self.sampler is not None:
            self._copy(request, parts, outputs)
        return answer

    def _copy(self, request: RequestContext, parts: Sequence[Part], outputs: Sequence[Mapping[str, Array]]) -> None:
        """Offer an answered request to the shadow and to the samples."""
        if self.shadow is not None:
            for part, computed in zip(parts, outputs, strict=True):
                self.shadow.offer(part.arrays, computed)
        if self.sampler is not None:
            self.sampler.offer(request, self.name, self.predictor, parts, outputs)

    async def choose(self, payload: Payload, request_id: bytes) -> ModelVersion:
        """Return who answers a request that names no version: this version or its canary.

        The id in the body decides, else that of the request, which the client gave or the service drew.
        """
        if self.canary is None:
            return self
        if payload.is_quick:
            key = payload.request_id()
        else:
            key = await self._budget.parse(math.inf, payload.request_id)
        return self.choose_by_id(key.encode() or request_id)

    def choose_by_id(self, request_id: bytes) -> ModelVersion:
        canary = self.canary
        return canary.candidate if canary is not None and canary.takes(request_id) else self

    def metadata(self, versions: Sequence[str]) -> dict[str, Any]:
        signature, session = self.bundle.signature, self.predictor.session
        return {
            "name": self.name,
            "versions": list(versions),
            "platform": PLATFORM,
            "inputs": [tensor_metadata(spec) for spec in signature.inputs],
            "outputs": [tensor_metadata(spec) for spec in signature.outputs],
            "properties": {
                "bundle": self.digest,
                "verdict": self.bundle.manifest.verdict,
                **({} if self.bundle.override is None else {"override": str(self.bundle.override)}),
                "variant": signature.variant,
                "provider": session.provider,
                "provider_fallback": session.fallback,
                "batching": f"off: {self.predictor.unbatched_reason}" if self.predictor.unbatched_reason else "on",
                **({"axes": text} if (text := _named_shapes((*signature.inputs, *signature.outputs))) else {}),
                **({"padding": signature.padding} if signature.padding else {}),
                **({} if self.generator is None else {"texts": self.generator.batching}),
                **({"missing": f"{', '.join(names)}: {_MISSING}"} if (names := signature.missing_inputs) else {}),
                **({} if self.predictor.text_signature is None else {"instances": _TEXT_TENSORS}),
            },
        }


@dataclass(frozen=True)
class Canary:
    """A candidate and its share of the requests.

    The same request id always meets the same version, on every server of this bundle and after every restart. An id
    that meets the candidate at 10 % meets it at 20 % as well; another candidate gets another tenth of the ids.
    """

    candidate: ModelVersion
    share: float

    def takes(self, request_id: bytes) -> bool:
        return id_position(self.candidate.digest, request_id) < self.share


def id_position(salt: str, request_id: bytes) -> float:
    """Return a number from 0 up to 1 for an id; ids are spread evenly."""
    digest = hashlib.blake2b(request_id, digest_size=8, key=salt.encode()[:64]).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)  # a float holds 53 bits


def batching_options(predictor: Predictor) -> BatchingOptions:
    runtime, limits = predictor.signature.runtime, predictor.signature.limits
    return BatchingOptions(
        mergeable=not predictor.unbatched_reason,
        max_rows=runtime.batch_rows,
        max_waiting=limits.max_waiting,
        delay_seconds=runtime.batch_delay_ms / 1e3,
        cpu_bound=predictor.session.provider == CPU,
    )


def _named_shapes(specs: Sequence[TensorSpec]) -> str:
    """Return the shapes with the names of axes, which the protocol's own shapes do not have; empty without any."""
    has_names = any(isinstance(axis, str) for spec in specs for axis in spec.shape[1:])
    return ", ".join(f"{spec.name} {format_shape(spec.shape)}" for spec in specs) if has_names else ""


def tensor_metadata(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": spec.protocol_shape}
