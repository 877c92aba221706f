"""The table of packing: useful tokens a second of our trainer on packed rows, beside a bare loop that pads."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.train.deepseek import DeepSeek, Padded, padding, useful_tokens
from benchmarks.train.loops import Size, ratios_to
from benchmarks.train.race import Course, Lap, race
from benchmarks.train.workloads import TEXTS, workload

LOOPS = ("ours", "padded")


@dataclass(frozen=True)
class Layout:
    """Of the same texts, packed and a row for each."""

    useful: Mapping[str, float]  # tokens of a batch, for each loop
    padding: Mapping[str, float]  # share of what each computes


@dataclass(frozen=True)
class Row:
    """Tokens are those of texts alone: padding counts for nothing."""

    processes: int
    packed_padding: float
    padding: float
    tokens_per_second: int
    padded_tokens_per_second: int
    median: float  # the former ÷ the latter, in the same round
    low: float
    high: float


def packed(size: Size, processes: Sequence[int], threads: int) -> dict[str, Any]:
    layout = layout_of_the_library()
    pythons = {name: Path(sys.executable) for name in LOOPS}
    rows = []
    for count in processes:
        course = Course(TEXTS, count, threads, size.lap or workload(TEXTS).lap, size.warm_laps, size.laps)
        rows.append(row_of(course, [race(course, pythons) for _ in range(size.heats)], layout))
        print(line(rows[-1]), file=sys.stderr, flush=True)
    return {"rows": [asdict(row) for row in rows]}


def layout_of_the_library() -> Layout:
    return Layout(
        useful={"ours": useful_tokens(DeepSeek()), "padded": useful_tokens(Padded())},
        padding={"ours": DeepSeek().rows().padding, "padded": padding()},
    )


def row_of(course: Course, heats: Sequence[Mapping[str, Sequence[Lap]]], layout: Layout) -> Row:
    gain = layout.useful["ours"] / layout.useful["padded"]
    ratios = [ratio * gain for heat in heats for ratio in ratios_to(heat["padded"], heat["ours"])]
    our_speed, padded_speed = (
        round(layout.useful[loop] * course.lap / statistics.median(lap.seconds for heat in heats for lap in heat[loop]))
        for loop in LOOPS
    )
    median, low, high = (round(ratio, 3) for ratio in (statistics.median(ratios), min(ratios), max(ratios)))
    padding = layout.padding
    return Row(course.processes, padding["ours"], padding["padded"], our_speed, padded_speed, median, low, high)


def line(row: Row) -> str:
    speeds = f"{row.tokens_per_second:9,.0f}{row.padded_tokens_per_second:9,.0f} tokens/s"
    shares = f"{row.packed_padding:7.1%}{row.padding:7.1%}"
    return f"deepseek{row.processes:>6}{shares}{speeds}{row.median:8.3f} ({row.low:.3f} to {row.high:.3f})"


def text(result: Mapping[str, Any]) -> str:
    head = (
        "useful tokens/s of packed rows and of a bare loop that pads: processes, padding of both, speeds, "
        "their ratio as median (min to max)"
    )
    return "\n".join([head, *[line(Row(**row)) for row in result["rows"]]])
