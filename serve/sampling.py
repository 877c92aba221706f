"""Samples of traffic, and labels: written to files off the path of the requests.

One thread of low priority writes the samples. What it cannot keep up with, or cannot store, is dropped and counted. The
answer to a label is sent once the label is stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import random
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec
import numpy as np
import orjson

from pipeline.contract.bundle import PROBE_ID
from pipeline.contract.codec import Part
from pipeline.contract.samples import Label, Sample, SampleFolder, label_table, sample_table
from pipeline.system.errors import InvalidPayload
from serve.errors import Busy
from serve.monitoring.logs import LogLimit
from serve.request_context import RequestContext
from serve.runtime.predictor import Predictor
from serve.shadow import lower_priority

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Array]

MAX_WAITING = 4096  # requests
MAX_WAITING_BYTES = 64 << 20  # of their arrays
MAX_WAITING_LABELS = 4096
_MAX_FILE_BYTES = 8 << 20  # of arrays, which compression makes smaller
_FIRST_SECONDS, _LONGEST_SECONDS = 2.0, 60.0  # between files: a new service shows its first samples soon
_SEND_SECONDS = 5.0
_LABEL_SECONDS = _CLOSE_SECONDS = 30.0
_PROBE = PROBE_ID.encode()

log = logging.getLogger(__name__)


class SamplingOptions(NamedTuple):
    share: float = 0.0  # of the requests; 0: no samples, and no labels
    folder: str = ""  # or an fsspec URL; empty: no files
    max_bytes: int = 0  # of files of samples
    url: str = ""  # that gets CloudEvents; empty: none


@dataclass
class SampleCounts:
    """Requests, labels and files; each field is counted by one thread at a time."""

    written: int = 0
    sent: int = 0  # as CloudEvents
    dropped: int = 0  # the thread was busy
    failed: int = 0  # could not be redacted, written or sent
    labels: int = 0
    files_deleted: int = 0


class Feedback(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /feedback`."""

    id: str
    label: Any


class _Copy(NamedTuple):
    id: bytes
    time: float
    seconds: float
    name: str  # of the model
    digest: str
    predictor: Predictor
    parts: Sequence[Part]
    outputs: Sequence[Arrays]
    size: int


@dataclass
class _Batch:
    """Labels that are written together: those that came while others were written."""

    labels: list[Label] = field(default_factory=list)
    is_stored: bool = False


class Sampler:
    """`offer` costs the caller a random number and an entry in a queue, whatever becomes of the copy."""

    def __init__(self, options: SamplingOptions) -> None:
        self.share, self.counts = options.share, SampleCounts()
        self.takes_labels = bool(options.folder)
        self._folder = SampleFolder(options.folder) if options.folder else None
        self._max_bytes, self._url = options.max_bytes, options.url
        self._copies: queue.Queue[_Copy | None] = queue.Queue(MAX_WAITING)
        self._batch, self._label_lock = _Batch(), asyncio.Lock()
        self._offered_bytes = self._taken_bytes = 0  # one thread writes each
        self._samples: dict[str, list[Sample]] = {}  # by bundle, as a file has the columns of one
        self._held_bytes, self._wait, self._write_at = 0, _FIRST_SECONDS, 0.0
        self._is_closing = False
        self._failures = LogLimit("more samples failed than are logged")
        self._thread = threading.Thread(target=self._run, name="samples", daemon=True)
        self._thread.start()

    def offer(
        self, request: RequestContext, name: str, predictor: Predictor, parts: Sequence[Part], outputs: Sequence[Arrays]
    ) -> None:
        """Copy a request and its outputs, by share and where there is room; on the event loop."""
        if random.random() >= self.share or request.id == _PROBE:
            return
        arrays = [array for part in parts for array in part.arrays.values()]
        size = sum(array.nbytes for array in arrays) + sum(one.nbytes for each in outputs for one in each.values())
        if self._offered_bytes - self._taken_bytes + size > MAX_WAITING_BYTES:
            self.counts.dropped += 1
            return
        seconds = request.encoded_at - request.received_at
        copy = _Copy(request.id, time.time(), seconds, name, predictor.bundle.digest, predictor, parts, outputs, size)
        try:
            self._copies.put_nowait(copy)
        except queue.Full:
            self.counts.dropped += 1
        else:
            self._offered_bytes += size

    async def store_label(self, body: bytes) -> None:
        """Store a label, or raise: with `Busy`, it may be sent again."""
        try:
            given = msgspec.json.decode(body, type=Feedback)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise InvalidPayload(f'body: {error}; send {{"id": "…", "label": …}}') from None
        if not 0 < len(given.id) <= 128:
            raise InvalidPayload("id: must be that of a request, its x-request-id, of 1 to 128 characters")
        batch = self._batch
        if len(batch.labels) >= MAX_WAITING_LABELS:
            raise Busy("labels arrive faster than they can be stored; send it again", 1)
        batch.labels.append(Label(given.id, time.time(), orjson.dumps(given.label).decode()))
        try:
            async with asyncio.timeout(_LABEL_SECONDS), self._label_lock:
                if not batch.is_stored:  # the first of a batch writes all of it
                    self._batch = _Batch()
                    await asyncio.to_thread(self._write_labels, batch)
        except TimeoutError:
            raise Busy("the label was not stored in time; send it again, it counts once", 10) from None
        if not batch.is_stored:
            raise Busy("the label could not be stored; send it again", 10)

    def close(self) -> None:
        """Write what is left, and end the thread."""
        self._is_closing = True
        with contextlib.suppress(queue.Full):  # the thread is awake then
            self._copies.put_nowait(None)
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        lower_priority()
        while True:
            try:
                wait = max(0.0, self._write_at - time.monotonic()) if self._samples else None
                copy = self._copies.get(timeout=wait)
            except queue.Empty:
                self._write()
                continue
            if copy is not None:
                self._taken_bytes += copy.size
                self._add(copy)
            if self._is_closing and self._copies.empty():
                self._write()
                return

    def _add(self, copy: _Copy) -> None:
        try:
            samples = [sample for part, outputs in zip(copy.parts, copy.outputs, strict=True)
                       for sample in _samples(copy, part, outputs)]  # fmt: skip
        except Exception as error:  # the user's code
            self._fail("a sample could not be redacted, so it is not kept", error, 1)
            return
        if self._url:
            self._send(copy, samples)
        if self._folder is None:
            return
        if not self._samples:
            self._write_at = time.monotonic() + self._wait
        self._samples.setdefault(copy.digest, []).extend(samples)
        self._held_bytes += copy.size
        if self._held_bytes >= _MAX_FILE_BYTES or time.monotonic() >= self._write_at:
            self._write()

    def _write(self) -> None:
        held, self._samples, self._held_bytes = self._samples, {}, 0
        self._wait = min(2 * self._wait, _LONGEST_SECONDS)
        for samples in held.values():
            requests = len({sample.id for sample in samples})
            try:
                assert self._folder is not None
                self._folder.write("samples", sample_table(samples))
                self.counts.written += requests
                self._delete_oldest()
            except Exception as error:  # libraries behind fsspec have their own
                self._fail("samples could not be written", error, requests)

    def _delete_oldest(self) -> None:
        assert self._folder is not None
        sizes = self._folder.sizes("samples")
        total = sum(sizes.values())
        for name, size in sizes.items():
            if total <= self._max_bytes:
                return
            self.counts.files_deleted += self._folder.remove(name)
            total -= size

    def _write_labels(self, batch: _Batch) -> None:
        try:
            assert self._folder is not None
            self._folder.write("labels", label_table(batch.labels))
        except Exception as error:
            self._fail("labels could not be written", error, 0)
        else:
            batch.is_stored = True
            self.counts.labels += len(batch.labels)

    def _send(self, copy: _Copy, samples: Sequence[Sample]) -> None:
        """Send two CloudEvents for each sample, as KServe's inference logger does: the request and its answer."""
        predictor, moment = copy.predictor, datetime.fromtimestamp(copy.time, UTC).isoformat()
        datatypes = {spec.name: spec.datatype for spec in (*predictor.signature.inputs, *predictor.signature.outputs)}
        try:
            for sample in samples:
                request = {"id": sample.id, "inputs": _tensors(sample.inputs, datatypes)}
                answer = {"id": sample.id, "model_name": copy.name, "outputs": _tensors(sample.outputs, datatypes)}
                for kind, body in (("request", request), ("response", answer)):
                    headers = {
                        "content-type": "application/json",
                        "ce-specversion": "1.0",
                        "ce-id": sample.id,
                        "ce-type": f"org.kubeflow.serving.inference.{kind}",
                        "ce-source": f"/v2/models/{copy.name}/infer",
                        "ce-time": moment,
                        "ce-inferenceservicename": copy.name,
                        "ce-component": "predictor",
                    }
                    event = urllib.request.Request(self._url, orjson.dumps(body), headers, method="POST")  # noqa: S310
                    urllib.request.urlopen(event, timeout=_SEND_SECONDS).close()  # noqa: S310
            self.counts.sent += 1
        except Exception as error:
            self._fail("a sample could not be sent", error, 1)

    def _fail(self, text: str, error: Exception, requests: int) -> None:
        self.counts.failed += requests
        if self._failures.allows():
            log.warning("%s: %s: %s", text, type(error).__name__, error)


def _samples(copy: _Copy, part: Part, outputs: Arrays) -> list[Sample]:
    """Return what may be kept of instances that ran together: one sample, or where the codec redacts one for each."""
    rows = sum(len(next(iter(each.arrays.values()))) for each in copy.parts)
    given = (copy.id.decode(), copy.time, copy.digest, copy.seconds)
    positions = part.positions or range(rows)  # tensors of a client are not split
    if copy.predictor.redact is None:
        return [Sample(*given, positions, rows, part.arrays, outputs)]
    samples = []
    for row, position in enumerate(positions):
        instance = {name: np.array(array[row]) for name, array in (*part.arrays.items(), *outputs.items())}
        kept = {name: np.asarray(array)[None] for name, array in copy.predictor.redact(instance).items()}
        inputs = {name: array for name, array in kept.items() if name in part.arrays}
        answers = {name: array for name, array in kept.items() if name in outputs}
        samples.append(Sample(*given, (position,), rows, inputs, answers))
    return samples


def _tensors(arrays: Arrays, datatypes: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return tensors as the JSON of the Open Inference Protocol has them."""
    return [
        {"name": name, "shape": list(array.shape), "datatype": datatypes[name], "data": _numbers(array)}
        for name, array in arrays.items()
    ]


def _numbers(array: Array) -> list[Any]:
    flat = array.reshape(-1).tolist()
    return [value.decode(errors="replace") if isinstance(value, bytes) else value for value in flat]
