"""The table of checkpoints: what one after every step costs, and how much of that is the bytes themselves."""

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
PROCESSES = (1, 2)
LOOPS = ("ours", "copying", "saving")


@dataclass(frozen=True)
class Row:
    """Times of a step as ratios to one without a checkpoint, medians; CPU times are of all processes together."""

    workload: str
    processes: int
    copying: float
    saving: float
    cpu_ms: float
    copying_cpu_ms: float
    saving_cpu_ms: float

    @property
    def beyond(self) -> float:
        """Return the CPU time of a checkpoint beyond copying its bytes, relative to that of a step."""
        return (self.saving_cpu_ms - self.copying_cpu_ms) / self.cpu_ms


def saving(size: Size, workloads: Sequence[str], processes: Sequence[int]) -> dict[str, Any]:
    pythons = {name: Path(sys.executable) for name in LOOPS}
    rows = []
    for workload, count in itertools.product(workloads, processes):
        course = Course(workload, count, 1, size.lap or WORKLOADS[workload].lap, size.warm_laps, size.laps)
        rows.append(row_of(course, [race(course, pythons) for _ in range(size.heats)]))
        print(line(rows[-1]), file=sys.stderr, flush=True)
    return {"rows": [asdict(row) for row in rows]}


def row_of(course: Course, heats: Sequence[Mapping[str, Sequence[Lap]]]) -> Row:
    """Compare laps of the same round, so that other load on the machine affects both."""
    copied_ratio, saved_ratio = (
        round(statistics.median(ratio for heat in heats for ratio in ratios_to(heat[loop], heat["ours"])), 3)
        for loop in LOOPS[1:]
    )
    cpu = [
        round(statistics.median(lap.cpu_seconds for heat in heats for lap in heat[loop]) / course.lap * 1e3, 2)
        for loop in LOOPS
    ]
    return Row(course.workload, course.processes, copied_ratio, saved_ratio, *cpu)


def line(row: Row) -> str:
    times = f"{row.copying:8.3f}{row.saving:8.3f}"
    cpu = f"{row.cpu_ms:9.2f}{row.copying_cpu_ms:9.2f}{row.saving_cpu_ms:9.2f} ms"
    return f"{row.workload:<12}{row.processes:>2}{times}{cpu}{row.beyond:9.1%}"


def text(result: Mapping[str, Any]) -> str:
    head = (
        "a checkpoint after every step: time of a step with the bytes alone and with the checkpoint, as ratios to a "
        "step without; CPU time of the three; and what is beyond the bytes, as a share of a step's CPU time"
    )
    return "\n".join([head, *[line(Row(**row)) for row in result["rows"]]])
