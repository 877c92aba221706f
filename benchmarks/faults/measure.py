"""One training under failures, and the share of its time that went into steps that count."""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults.failures import Victim, failures
from pipeline.chaos.campaign import Campaign, kill_events
from pipeline.chaos.verdict import recoveries, training_log
from pipeline.contract.chaos import ChaosEvent
from pipeline.contract.run import Run
from pipeline.history import Project

PROJECT = Path(__file__).with_name("project")
_BATCH_SIZE, _EPOCH_STEPS = 32, 512


@dataclass(frozen=True)
class Course:
    """What is measured."""

    steps: int
    processes: int
    checkpoint_every: int
    victim: Victim
    seed: int


@dataclass(frozen=True)
class Row:
    every_seconds: float  # the mean time between two failures; 0: none
    goodput: float  # median undisturbed step time × distinct steps ÷ time from the first step to the end
    steps: int
    seconds: float
    kills: int
    by_hand: int  # times that `pipe run --resume` was needed
    recovery_p50: float | None  # seconds from a kill to the next step
    recovery_p99: float | None
    checkpoint_p50_ms: float | None  # that a checkpoint keeps training waiting
    checkpoint_p99_ms: float | None


def measure(course: Course, intervals: Sequence[float], folder: Path) -> dict[str, Any]:
    """Train without failures first, then with each interval; goodput is relative to the first median step."""
    campaign = Campaign(Project(PROJECT, folder), PROJECT, folder, lambda _: None)
    config = campaign.project.config(overrides(course))
    prepared = campaign.prepare(config)
    step_seconds, rows = 0.0, []
    for seconds in (0.0, *intervals):
        run = campaign.new_run(prepared, config)
        due = failures(seconds, course.victim, course.processes, course.seed)
        attack = campaign.attack(run, [], due, lambda _: None)
        attack.train()
        ended = time.time()
        step_seconds = step_seconds or median_step(run)
        rows.append(row_of(seconds, run, attack.log.events(), ended, step_seconds, len(attack.by_hand)))
        print(line(rows[-1]), file=sys.stderr, flush=True)
    return {"course": asdict(course), "step_ms": 1e3 * step_seconds, "rows": [asdict(row) for row in rows]}


def overrides(course: Course) -> list[str]:
    per_epoch = min(course.steps, _EPOCH_STEPS)
    return [
        f"train.max_samples={per_epoch * _BATCH_SIZE}",
        f"train.batch_size={_BATCH_SIZE}",
        f"train.epochs={course.steps // per_epoch}",
        f"train.processes={course.processes}",
        f"train.checkpoint_every={course.checkpoint_every}",
    ]


def row_of(
    every: float, run: Run, events: Sequence[ChaosEvent], ended: float, step_seconds: float, by_hand: int
) -> Row:
    first_step_time = next(event.time for event in events if event.event == "step")
    steps = json.loads((run.output("train") / "summary.json").read_text())["steps"]
    back = [seconds for _, seconds in recoveries(events, None) if seconds is not None]
    blocked = [1e3 * line["checkpoint_seconds"] for line in training_log(run) if "checkpoint_seconds" in line]
    return Row(
        every_seconds=every,
        goodput=step_seconds * steps / (ended - first_step_time),
        steps=steps,
        seconds=ended - first_step_time,
        kills=len(kill_events(events)),
        by_hand=by_hand,
        recovery_p50=percentile(back, 0.5),
        recovery_p99=percentile(back, 0.99),
        checkpoint_p50_ms=percentile(blocked, 0.5),
        checkpoint_p99_ms=percentile(blocked, 0.99),
    )


def median_step(run: Run) -> float:
    """Return the median over windows of a few steps, most of which contain no checkpoint."""
    median: float = statistics.median(line["step_seconds"] for line in training_log(run) if "step_seconds" in line)
    return median


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the nearest measured value."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def text(results: Mapping[str, Any]) -> str:
    course = results["course"]
    head = (
        f"{course['steps']} steps of {results['step_ms']:.1f} ms undisturbed, {course['processes']} processes, "
        f"a checkpoint every {course['checkpoint_every']} steps, kill -9 of a {course['victim']}, seed {course['seed']}"
    )
    lines = [
        head,
        f"{'failure every':<15}{'goodput':>8}{'kills':>7}{'recovery p50':>14}{'p99':>8}{'blocked p50':>13}{'p99':>10}",
    ]
    return "\n".join([*lines, *(line(Row(**row)) for row in results["rows"])])


def line(row: Row) -> str:
    interval = f"{row.every_seconds:g} s" if row.every_seconds else "never"
    recovery = [f"{value:.1f} s" if value is not None else "-" for value in (row.recovery_p50, row.recovery_p99)]
    blocked = [
        f"{value:.1f} ms" if value is not None else "-" for value in (row.checkpoint_p50_ms, row.checkpoint_p99_ms)
    ]
    by_hand = f"  (resumed by hand {row.by_hand} times)" if row.by_hand else ""
    return (
        f"{interval:<15}{row.goodput:>8.3f}{row.kills:>7}{recovery[0]:>14}{recovery[1]:>8}{blocked[0]:>13}{blocked[1]:>10}"
        f"{by_hand}"
    )
