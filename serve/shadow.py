"""A candidate that gets a copy of requests off the critical path; it answers nobody, and how it differs is counted."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import random
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.contract.bundle import open_bundle
from pipeline.contract.errors import BundleError
from pipeline.contract.signature import Signature
from pipeline.contract.signing import Trust
from serve.loading import prove
from serve.logs import told
from serve.runtime.predictor import Predictor

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Array]

MAX_WAITING_COPIES = 64  # copies; more are dropped, for the real requests need the machine

log = logging.getLogger(__name__)


@dataclass
class Agreement:
    """Counted by the shadow's own thread, but for `dropped`."""

    same: int = 0  # requests whose outputs were within the candidate's tolerance
    other: int = 0
    failed: int = 0  # the candidate could not compute what the current version could
    dropped: int = 0  # not asked: the shadow was busy
    rows: int = 0  # of outputs that rank classes
    rows_same_class: int = 0
    max_difference: float = 0.0


class Shadow:
    """`offer` costs the caller a random number and a queue without waiting, whatever the candidate does."""

    def __init__(self, name: str, path: Path, predictor: Predictor, share: float) -> None:
        self.name, self.path, self.digest, self.share = name, path, predictor.bundle.digest, share
        self.signature = predictor.signature
        self.agreement = Agreement()
        golden = predictor.bundle.golden()
        self._predictor, self._rtol, self._atol = predictor, golden.rtol, golden.atol
        self._copies: queue.Queue[tuple[Arrays, Arrays] | None] = queue.Queue(MAX_WAITING_COPIES)
        self._closed = False
        self._thread = threading.Thread(target=self._follow, name="shadow", daemon=True)
        self._thread.start()

    def offer(self, inputs: Arrays, outputs: Arrays) -> None:
        if random.random() >= self.share or self._closed:
            return
        try:
            self._copies.put_nowait((inputs, outputs))
        except queue.Full:
            self.agreement.dropped += 1

    def close(self) -> None:
        """What still waits is not asked any more; the thread ends after what it is at."""
        self._closed = True
        with contextlib.suppress(queue.Full):  # full: it sees the flag at the next
            self._copies.put_nowait(None)

    def status(self) -> dict[str, Any]:
        return {"bundle": self.digest, "path": str(self.path), "share": self.share, **asdict(self.agreement)}

    def _follow(self) -> None:
        _step_back()
        while (copy := self._copies.get()) is not None and not self._closed:
            self._compare(*copy)

    def _compare(self, inputs: Arrays, outputs: Arrays) -> None:
        try:
            found = self._predictor.run(inputs, list(outputs))
        except Exception as error:  # of the candidate alone: the client has its answer already
            self.agreement.failed += 1
            if self.agreement.failed == 1:
                log.warning("shadow failed (told once, then counted): %s", error, extra=told(bundle=self.digest[:12]))
            return
        count(self.agreement, outputs, found, self._rtol, self._atol)


def count(agreement: Agreement, expected: Arrays, found: Arrays, rtol: float, atol: float) -> None:
    """Add one request's outputs: floating point within tolerance, all else exactly."""
    same = True
    for name, wanted in expected.items():
        got = found[name]
        if got.shape != wanted.shape or got.dtype != wanted.dtype:
            same = False
            continue
        if not np.issubdtype(wanted.dtype, np.floating):
            same = same and bool((got == wanted).all())
            continue
        same = same and bool(np.allclose(got, wanted, rtol=rtol, atol=atol, equal_nan=True))
        _measure(agreement, wanted, got)
    if same:
        agreement.same += 1
    else:
        agreement.other += 1


def _measure(agreement: Agreement, wanted: Array, got: Array) -> None:
    if wanted.size:
        with np.errstate(invalid="ignore"):  # of two infinities there is no difference to tell
            apart = np.abs(got.astype(np.float64) - wanted.astype(np.float64))
        finite = apart[np.isfinite(apart)]
        agreement.max_difference = max(agreement.max_difference, float(finite.max(initial=0.0)))
    if wanted.ndim == 2 and wanted.shape[1] > 1:
        agreement.rows += len(wanted)
        agreement.rows_same_class += int((wanted.argmax(axis=1) == got.argmax(axis=1)).sum())


def open_shadow(name: str, path: Path, signature: Signature, share: float, trust: Trust | None = None) -> Shadow:
    """Proven like any bundle. It computes on one thread, the one that may step back."""
    bundle = open_bundle(path, trust)
    if wrong := incompatibility(signature, bundle.signature):
        raise BundleError(f"{path}: it cannot shadow {name}: {wrong}")
    return Shadow(name, path, prove(bundle, None, threads=1), share)


def incompatibility(current: Signature, candidate: Signature) -> str:
    """Why the one's requests mean nothing to the other, if so."""
    if current.inputs != candidate.inputs:
        return f"its inputs are {_listed(candidate.inputs)}, the current ones {_listed(current.inputs)}"
    have = {spec.name for spec in candidate.outputs}
    if missing := sorted(spec.name for spec in current.outputs if spec.name not in have):
        return f"it has no output {', '.join(missing)}"
    return ""


def _listed(specs: Any) -> str:
    return ", ".join(f"{spec.name} {spec.datatype} {list(spec.shape)}" for spec in specs)


def _step_back() -> None:
    """On Linux a thread has a priority of its own; what it takes from the predictions is what they leave."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
