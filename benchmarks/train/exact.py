"""The table of `elastic_shards: 4`: what the same bits cost, against DistributedDataParallel and one process alone."""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.train.loops import Size, ratios_to
from benchmarks.train.race import Course, Lap, race
from benchmarks.train.workloads import WORKLOADS

WORKED = ("digits", "transformer")
PROCESSES = (1, 2, 4)
THREADS = 1  # what exact training takes in any case


@dataclass(frozen=True)
class Row:
    """A ratio above one is how much longer an exact step takes; CPU times are of all processes together."""

    workload: str
    processes: int
    median: float
    low: float
    high: float
    exact_cpu_ms: float
    close_cpu_ms: float


def exact(size: Size, workloads: Sequence[str], processes: Sequence[int]) -> dict[str, Any]:
    pythons = {name: Path(sys.executable) for name in ("ours", "exact")}
    rows = []
    for workload, count in itertools.product(workloads, processes):
        lap = size.lap or WORKLOADS[workload].lap
        course = Course(workload, count, THREADS, lap, size.warm_laps, size.laps)
        rows.append(row_of(course, [race(course, pythons) for _ in range(size.heats)]))
        print(line(rows[-1]), file=sys.stderr, flush=True)
    return {"rows": [asdict(row) for row in rows]}


def row_of(course: Course, heats: Sequence[Mapping[str, Sequence[Lap]]]) -> Row:
    """Compare laps of the same round, so that other load on the machine affects both."""
    ratios = [ratio for heat in heats for ratio in ratios_to(heat["exact"], heat["ours"])]
    exact_ms, close_ms = (
        round(statistics.median(lap.cpu_seconds for heat in heats for lap in heat[loop]) / course.lap * 1e3, 2)
        for loop in ("exact", "ours")
    )
    median, low, high = (round(ratio, 3) for ratio in (statistics.median(ratios), min(ratios), max(ratios)))
    return Row(course.workload, course.processes, median, low, high, exact_ms, close_ms)


def line(row: Row) -> str:
    ratios = f"{row.median:6.3f} ({row.low:.3f} to {row.high:.3f})"
    return f"{row.workload:<12}{row.processes:>2}  {ratios:<26}{row.exact_cpu_ms:8.2f} ms{row.close_cpu_ms:8.2f} ms"


def text(result: Mapping[str, Any]) -> str:
    head = (
        "time of a step with elastic_shards=4 as a ratio to elastic_shards=0: median (min to max), and CPU time of both"
    )
    return "\n".join([head, *[line(Row(**row)) for row in result["rows"]]])
