"""Milliseconds of one batch with each execution provider, without a service around it."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.serve.workloads import Workload
from pipeline.contract.bundle import Bundle, open_bundle
from pipeline.system.errors import PipelineError
from serve.runtime.loading import capture_graphs, warm_up
from serve.runtime.predictor import Predictor
from serve.runtime.session import Provider, Session

SIZES = (1, 8, 32)
SETUPS: tuple[tuple[str, Provider, bool], ...] = (
    ("cpu", "cpu", False),
    ("cuda without graphs", "cuda", False),
    ("cuda", "cuda", True),
    ("tensorrt", "tensorrt", False),
)


@dataclass(frozen=True)
class Row:
    workload: str
    title: str
    load_seconds: float = 0.0
    run_ms: tuple[float, ...] = ()  # of a batch of each of SIZES, median
    failed: str = ""  # why the provider cannot be measured here


def measure(workload: Workload, seconds: float) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="pipe-providers-") as folder:
        bundle = open_bundle(workload.bundle(Path(folder) / "bundle"))
        return [_measure(workload, bundle, *setup, seconds) for setup in SETUPS]


def _measure(workload: Workload, bundle: Bundle, title: str, provider: Provider, graphs: bool, seconds: float) -> Row:
    began = time.perf_counter()
    try:
        predictor = Predictor(bundle, Session(bundle, provider))
        if graphs:
            capture_graphs(bundle, predictor)
        warm_up(bundle, predictor)
    except PipelineError as error:
        return Row(workload.name, title, failed=str(error))
    loaded = time.perf_counter() - began
    batches = [np.repeat(workload.request, rows, axis=0) for rows in SIZES]
    return Row(workload.name, title, loaded, tuple(_median_ms(predictor, batch, seconds) for batch in batches))


def _median_ms(predictor: Predictor, batch: np.ndarray, seconds: float) -> float:
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        began = time.perf_counter()
        predictor.run({"x": batch})
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


def text(rows: Sequence[Row]) -> str:
    head = ["model", "provider", "s to load", *(f"ms for {size}" for size in SIZES)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in (row for row in rows if not row.failed):
        values = [f"{row.load_seconds:.2f}", *(f"{value:.3f}" for value in row.run_ms)]
        lines.append("| " + " | ".join([row.workload, row.title, *values]) + " |")
    return "\n".join([*lines, *(f"{row.workload} skipped: {row.failed}" for row in rows if row.failed)])
