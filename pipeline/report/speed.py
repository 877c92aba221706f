"""What training's time went into: throughput, the exchange between processes, how batches were chosen and cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.report.budget import exposed_share, time_budget
from pipeline.report.charts import Series, line_chart
from pipeline.spec.facts import Facts
from pipeline.spec.html import Child, Html, el, flat, pairs
from pipeline.spec.wording import number, percent, seconds, size

_STYLES = ("one", "two", "three")
_MOST_LANES = 6  # of a chart; with more processes, the largest and the smallest share are drawn


def speed(facts: Facts, other: Facts | None = None) -> Child:
    if not facts.steps:
        return None
    charts = [
        line_chart("Throughput", _both(facts, other, "samples/s", "samples_per_second", "one")),
        line_chart("Exposed communication", _both(facts, other, "share of time", "communication_share", "two")),
        line_chart("Shares of a batch", _lanes(facts)),
        _sizes_tried(facts),
    ]
    beside = el("div", charts, class_="charts")
    return flat(time_budget(facts, other), beside, pairs(_figures(facts)), _timeline(facts))


def _both(facts: Facts, other: Facts | None, name: str, key: str, style: str) -> list[Series]:
    mine = Series(name, facts.curve(key), style, smooth=True)
    theirs = [Series(f"{name}, other run", other.curve(key), style, smooth=True, other=True)] if other else []
    return [*theirs, mine]


def _figures(facts: Facts) -> Iterator[tuple[str, str]]:
    if facts.batch_size:
        largest, limit = facts.batch_size.get("largest"), facts.batch_size.get("limit")
        taken = number(facts.batch_size.get("batch_size"))
        yield "batch size", f"{taken}, the fastest; {number(largest)} is the largest that fits, for want of {limit}"
    if found := exposed_share(facts):
        yield "exposed communication", f"{percent(found[0])} ({found[1]})"
    if sent := facts.curve("sent_bytes_per_step"):
        yield "sent by the first process", f"{size(sum(value for _, value in sent) / len(sent))} a step"
    times = sorted(value for _, value in facts.curve("step_seconds"))
    if times:
        yield "median step", seconds(times[len(times) // 2])
    if pauses := sorted(value for _, value in facts.curve("checkpoint_seconds")):
        yield "median pause for a checkpoint", seconds(pauses[len(pauses) // 2])
    if waits := facts.curve("data_wait_share"):
        yield "waiting for data", percent(sum(value for _, value in waits) / len(waits))
    if memory := facts.curve("memory_mb"):
        yield "memory of the largest process", size(max(value for _, value in memory) * 2**20)
    if used := facts.curve("gpu_utilization"):
        yield "GPU in use", percent(sum(value for _, value in used) / len(used))
    yield from _scaling(facts.summary or facts.steps[-1])


def _scaling(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if "overflow_steps" in found:
        yield "steps skipped for overflow", number(found["overflow_steps"])
        yield "loss scale", number(found.get("loss_scale"))


def _lanes(facts: Facts) -> list[Series]:
    """The share of each process, where they follow its speed."""
    lines = [(line["step"], line["batch_share"]) for line in facts.steps if isinstance(line.get("batch_share"), dict)]
    names = list(lines[0][1]) if lines else []
    if len(names) <= _MOST_LANES:
        curves = {name: [(step, shares.get(name, 0.0)) for step, shares in lines] for name in names}
    else:
        ends = {"largest": max, "smallest": min}
        curves = {name: [(step, pick(shares.values())) for step, shares in lines] for name, pick in ends.items()}
    return [Series(name, points, _STYLES[i % len(_STYLES)]) for i, (name, points) in enumerate(curves.items())]


def _sizes_tried(facts: Facts) -> Html | None:
    """By `batch_size: auto`, with the one it took."""
    timed = facts.batch_size.get("timed")
    if not timed:
        return None
    top, taken = max(entry["samples_per_second"] for entry in timed), facts.batch_size["batch_size"]
    rows = [_tried(entry["batch_size"], entry["samples_per_second"], top, taken) for entry in timed]
    caption = el("figcaption", el("b", "Batch sizes tried"), el("span", "samples/s", class_="legend"))
    return el("figure", caption, el("div", rows, class_="times"), class_="tried")


def _tried(batch_size: int, rate: float, top: float, taken: int) -> Html:
    bar = el("div", el("i", style=f"width:{100 * rate / top:.1f}%"))
    kind = "taken" if batch_size == taken else None
    return el("div", el("span", number(batch_size)), bar, el("b", number(rate)), class_=kind)


def _timeline(facts: Facts) -> Html | None:
    if not facts.timeline:
        return None
    how = "Open it at ui.perfetto.dev or chrome://tracing; each process has a lane."
    return el("p", "Timeline of all processes: ", el("code", facts.timeline), f". {how}", class_="muted")
