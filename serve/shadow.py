"""A shadow: a candidate bundle that gets copies of requests, answers none, and whose differences are counted.

It runs on one thread of low priority, off the path of the requests.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import random
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.contract.bundle import open_bundle
from pipeline.contract.codec import Array, Arrays
from pipeline.contract.signature import Signature, TensorSpec
from pipeline.contract.signing import Trust
from pipeline.system.errors import BundleError
from serve.monitoring.logs import log_fields
from serve.runtime.loading import load_predictor
from serve.runtime.predictor import Predictor

MAX_WAITING_COPIES = 64  # more are dropped, as the real requests need the machine
_LOWEST_PRIORITY = 19

log = logging.getLogger(__name__)


@dataclass
class Agreement:
    """How the candidate's outputs compare; counted by the thread of the shadow, except `dropped`."""

    same: int = 0  # requests whose outputs were within the candidate's tolerance
    other: int = 0
    failed: int = 0  # the candidate could not compute what the current version could
    dropped: int = 0  # not compared, as the shadow was busy
    rows: int = 0  # of outputs that rank classes
    rows_same_class: int = 0
    max_difference: float = 0.0


class Shadow:
    """`offer` costs the caller a random number and an entry in a queue, whatever the candidate does."""

    def __init__(self, name: str, path: Path, predictor: Predictor, share: float) -> None:
        self.name, self.path, self.digest, self.share = name, path, predictor.bundle.digest, share
        self.signature = predictor.signature
        self.agreement = Agreement()
        golden = predictor.bundle.golden()
        self._predictor, self._rtol, self._atol = predictor, golden.rtol, golden.atol
        self._copies: queue.Queue[tuple[Arrays, Arrays] | None] = queue.Queue(MAX_WAITING_COPIES)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="shadow", daemon=True)
        self._thread.start()

    def offer(self, inputs: Arrays, outputs: Arrays) -> None:
        """Copy a request and its outputs, by share and where there is room."""
        if random.random() >= self.share or self._closed:
            return
        try:
            self._copies.put_nowait((inputs, outputs))
        except queue.Full:
            self.agreement.dropped += 1

    def close(self) -> None:
        """Drop the copies that wait; the thread ends after the one it is comparing."""
        self._closed = True
        with contextlib.suppress(queue.Full):  # the thread then sees the flag at the next copy
            self._copies.put_nowait(None)

    def status(self) -> dict[str, Any]:
        return {"bundle": self.digest, "path": str(self.path), "share": self.share, **asdict(self.agreement)}

    def _run(self) -> None:
        lower_priority()
        while (copy := self._copies.get()) is not None and not self._closed:
            self._compare(*copy)

    def _compare(self, inputs: Arrays, outputs: Arrays) -> None:
        try:
            candidate = self._predictor.run(inputs, list(outputs))
        except Exception as error:  # the candidate's alone: the client has its answer already
            self.agreement.failed += 1
            if self.agreement.failed == 1:
                fields = log_fields(bundle=self.digest[:12])
                log.warning("shadow failed (logged once, then counted): %s", error, extra=fields)
            return
        count_differences(self.agreement, outputs, candidate, self._rtol, self._atol)


def count_differences(agreement: Agreement, current: Arrays, candidate: Arrays, rtol: float, atol: float) -> None:
    """Add one request's outputs: floating point within the tolerance, all else exactly."""
    same = True
    for name, expected in current.items():
        actual = candidate[name]
        if actual.shape != expected.shape or actual.dtype != expected.dtype:
            same = False
        elif not np.issubdtype(expected.dtype, np.floating):
            same = same and bool((actual == expected).all())
        else:
            same = same and bool(np.allclose(actual, expected, rtol=rtol, atol=atol, equal_nan=True))
            _measure_difference(agreement, expected, actual)
    agreement.same += same
    agreement.other += not same


def _measure_difference(agreement: Agreement, expected: Array, actual: Array) -> None:
    if expected.size:
        with np.errstate(invalid="ignore"):  # two infinities have no difference
            difference = np.abs(actual.astype(np.float64) - expected.astype(np.float64))
        finite = difference[np.isfinite(difference)]
        agreement.max_difference = max(agreement.max_difference, float(finite.max(initial=0.0)))
    if expected.ndim == 2 and expected.shape[1] > 1:
        agreement.rows += len(expected)
        agreement.rows_same_class += int((expected.argmax(axis=1) == actual.argmax(axis=1)).sum())


def open_shadow(name: str, path: Path, signature: Signature, share: float, trust: Trust | None = None) -> Shadow:
    """Verify a bundle like any other and start it as a shadow of the model with this signature."""
    bundle = open_bundle(path, trust)
    if why := incompatibility(signature, bundle.signature):
        raise BundleError(f"{path}: it cannot shadow {name}: {why}")
    return Shadow(name, path, load_predictor(bundle, threads=1), share)


def incompatibility(current: Signature, candidate: Signature) -> str:
    """Return why the candidate cannot take the current version's requests; empty if it can."""
    if _describe(current.inputs) != _describe(candidate.inputs):
        return f"its inputs are {_describe(candidate.inputs)}, the current ones {_describe(current.inputs)}"
    if missing := sorted(set(current.missing_inputs) - set(candidate.missing_inputs)):
        return f"it was trained without missing numbers in {', '.join(missing)}, which the current version allows"
    names = {spec.name for spec in candidate.outputs}
    if missing := sorted(spec.name for spec in current.outputs if spec.name not in names):
        return f"it has no output {', '.join(missing)}"
    return ""


def _describe(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(f"{spec.name} {spec.datatype} {list(spec.shape)}" for spec in specs)


def lower_priority() -> None:
    """Let predictions go first; on Linux a thread has its own priority."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
