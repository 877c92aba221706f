"""The first table: samples per second of each loop, as a ratio to the bare loop of the same mathematics."""

from __future__ import annotations

import itertools
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.train.environment import peers_python
from benchmarks.train.race import Course, Lap, race
from benchmarks.train.workloads import workload
from pipeline.system.errors import PipelineError

HERE = ("ours", "bare", "tuned")
PEERS = ("fabric", "lightning", "accelerate")
FOLDER = Path(__file__).resolve().parents[1] / ".peers"


@dataclass(frozen=True)
class Row:
    """One contestant on one workload; a ratio above one is faster than the bare loop beside it."""

    workload: str
    processes: int
    loop: str
    median: float
    low: float
    high: float
    cpu_ms_per_step: float  # of all processes together


@dataclass(frozen=True)
class Size:
    heats: int  # each with new processes, because memory placement differs between processes
    laps: int  # in a heat, of each contestant
    warm_laps: int
    lap: int  # steps; 0: as the workload defines


QUICK, FULL = Size(heats=1, laps=2, warm_laps=1, lap=4), Size(heats=4, laps=10, warm_laps=2, lap=0)


def loops(size: Size, names: Sequence[str], processes: Sequence[int], threads: int, peers: bool) -> dict[str, Any]:
    pythons = {name: Path(sys.executable) for name in HERE}
    skipped = ""
    try:
        pythons |= {name: peers_python(FOLDER) for name in PEERS if peers}
    except PipelineError as error:
        skipped = str(error)
    rows = []
    for name, count in itertools.product(names, processes):
        threads_per_process = threads or max(1, (os.cpu_count() or 1) // count)
        course = Course(name, count, threads_per_process, size.lap or workload(name).lap, size.warm_laps, size.laps)
        rows_of_course = rows_of(course, [race(course, pythons) for _ in range(size.heats)])
        rows += rows_of_course
        print("\n".join(line(row) for row in rows_of_course), file=sys.stderr, flush=True)
    return {"rows": [asdict(row) for row in rows], "skipped": skipped}


def rows_of(course: Course, heats: Sequence[Mapping[str, Sequence[Lap]]]) -> list[Row]:
    rows = []
    for loop in heats[0]:
        ratios = [ratio for heat in heats for ratio in ratios_to(heat["bare"], heat[loop])]
        cpu = statistics.median(lap.cpu_seconds for heat in heats for lap in heat[loop]) / course.lap * 1e3
        median, low, high = (round(ratio, 3) for ratio in (statistics.median(ratios), min(ratios), max(ratios)))
        rows.append(Row(course.workload, course.processes, loop, median, low, high, round(cpu, 2)))
    return rows


def ratios_to(bare: Sequence[Lap], other: Sequence[Lap]) -> list[float]:
    """Return the speed relative to the bare loop's lap of the same round: other load affects both."""
    return [bare_lap.seconds / lap.seconds for bare_lap, lap in zip(bare, other, strict=True)]


def line(row: Row) -> str:
    ratios = f"{row.median:6.3f} ({row.low:.3f} to {row.high:.3f})"
    return f"{row.workload:<12}{row.processes:>2}  {row.loop:<11}{ratios:<26}{row.cpu_ms_per_step:8.2f} ms"


def text(result: Mapping[str, Any]) -> str:
    lines = ["samples/s as a ratio to the bare loop: median (min to max), and CPU time per step"]
    lines += [line(Row(**row)) for row in result["rows"]]
    return "\n".join([*lines, f"peers skipped: {result['skipped']}"] if result["skipped"] else lines)
