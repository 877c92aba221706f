"""How training went: learning curves, beside those of another run where there is one, and what was best.

Where training's time went: waiting for data, for other processes, for checkpoints; the rest is computing.

What training's time went into: throughput, the exchange between processes, how batches were chosen and cut.

How a mixture of experts shared out its tokens: balance and certainty of the routers, and the last loads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.contract.facts import Body, Facts, is_number
from pipeline.contract.html import Child, Html, el, flat, number, pairs, percent, seconds, size, table
from pipeline.report.charts import Points, Series, drawing, label, line_chart, px


def curves(facts: Facts, other: Facts | None = None) -> Child:
    runs = [run for run in (other, facts) if run is not None]  # these curves lie above the other's
    if not facts.steps and not facts.validations:
        return None
    best = facts.summary.get("best_step")
    best_loss, best_other = ((float(best), f"best at {best}"), (float(best), "")) if best else (None, None)
    names = sorted({name for run in runs for line in run.validations for name in line["validation"]} - {"loss"})
    losses = [series for run in runs for series in _losses(run, run is other)]
    charts: list[Html | None] = [line_chart("Loss", losses, best_loss)]
    for name in names:
        lines = [_line(name, _validation(run, name), "two", run is other, dots=True) for run in runs]
        charts.append(line_chart(f"Validation {name}", lines, best_other))
    rates = [_line("lr", run.curve("lr"), "three", run is other) for run in runs]
    norms = [_line("norm", run.curve("grad_norm"), "three", run is other, smooth=True) for run in runs]
    charts += [line_chart("Learning rate", rates), line_chart("Gradient norm", norms)]
    return flat(el("div", charts, class_="charts"), _summary(facts))


def _losses(run: Facts, other: bool) -> list[Series]:
    return [
        _line("training", run.curve("loss"), "one", other, smooth=True),
        _line("validation", _validation(run, "loss"), "two", other, dots=True),
    ]


def _line(name: str, points: Points, style: str, other: bool, dots: bool = False, smooth: bool = False) -> Series:
    return Series(f"{name}, other run" if other else name, points, style, dots=dots, smooth=smooth, other=other)


def _validation(facts: Facts, name: str) -> Points:
    found = ((line["step"], line["validation"].get(name)) for line in facts.validations)
    return [(step, value) for step, value in found if is_number(value)]


def _summary(facts: Facts) -> Html | None:
    if not facts.summary:
        return None
    rows = {
        "processes": f"{facts.summary.get('world_size', '?')} × {str(facts.summary.get('device', '?')).upper()}",
        "batch size": number(facts.summary.get("batch_size")) if "batch_size" in facts.summary else None,
        "precision": str(facts.summary.get("precision", "?")),
        "optimizer steps": number(facts.summary.get("steps"))
        + (" (stopped early)" if facts.summary.get("stopped_early") else ""),
        "began again": _restarts(facts.summary),
        "best validation": _values(facts.summary.get("best_validation") or {}),
    }
    return pairs(rows.items())


def _restarts(summary: Mapping[str, Any]) -> str | None:
    """By itself, after it lost a process."""
    if not (count := summary.get("restarts")):
        return None
    times = "once" if count == 1 else f"{count} times"
    return f"{times} by itself, {seconds(summary.get('seconds_lost'))} without a step"


def _values(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in sorted(values.items()))


_WIDTH, _BAR = 960, 30
_REST = "validation and the rest"
_KINDS = {
    "computing": "one",
    "communication": "two",
    "data": "three",
    "checkpoints": "four",
    _REST: "five",
}


@dataclass(frozen=True)
class Budget:
    """Seconds by what they were spent on, of the first process."""

    parts: dict[str, float]
    complete: bool  # what lies between the steps is known too

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def budget_of(facts: Facts) -> Budget | None:
    """From the journal's lines, each of which speaks of the steps since the one before."""
    windows = list(_windows(facts))
    stepped = sum(spent for _, spent in windows)
    if not stepped:
        return None
    traced = exposed_share(facts)
    found = {
        "data": _weighed(windows, "data_wait_share"),
        "communication": _weighed(windows, "communication_share") or (traced and traced[0] * stepped),
        "checkpoints": _checkpoints(facts),
    }
    waits = {name: spent for name, spent in found.items() if spent is not None}
    computing = max(0.0, stepped - sum(waits.values()))  # a pause lies within the steps of the line that tells it
    parts = {"computing": computing, **waits}
    whole = facts.summary.get("seconds")
    if is_number(whole) and whole >= stepped:  # after a resume it speaks of the last attempt alone
        parts[_REST] = max(0.0, whole - sum(parts.values()))
    return Budget({name: parts[name] for name in _KINDS if name in parts}, _REST in parts)


def time_budget(facts: Facts, other: Facts | None) -> Html | None:
    runs = {"this run": facts, "other run": other}
    found = {name: budget for name, run in runs.items() if run and (budget := budget_of(run))}
    if not found:
        return None
    names = [name for name in _KINDS if any(name in one.parts for one in found.values())]
    rows = [(el("span", el("i", class_=f"key {_KINDS[name]}"), name), *_cells(name, found)) for name in names]
    rows.append(("altogether", *[cell for one in found.values() for cell in (seconds(one.total), "100%")]))
    head = ["", *[word for name in found for word in (name if len(found) > 1 else "time", "share")]]
    bars = [_bar(name, one, len(found) > 1) for name, one in found.items()]
    note = (
        None
        if all(one.complete for one in found.values())
        else "Of the optimizer steps; what lies between is not known."
    )
    caption = el("figcaption", el("b", "Time budget"), el("span", note, class_="legend") if note else None)
    return el("figure", caption, bars, table(head, rows), class_="budget")


def exposed_share(facts: Facts) -> tuple[float, str] | None:
    """How much of the time went into waiting for the exchange, and where that is known from."""
    if traced := [of["exposed"] for name, of in facts.communication.items() if name.startswith("rank ")]:
        first, count = facts.communication["first_step"], facts.communication["steps"]
        return sum(traced) / len(traced), f"timeline of steps {first} to {first + count - 1}"
    if told := [value for _, value in facts.curve("communication_share")]:
        return sum(told) / len(told), "mean of all steps"
    return None


def _windows(facts: Facts) -> Iterator[tuple[Body, float]]:
    """The lines of the journal, with the seconds each speaks of."""
    before = 0
    for line in facts.steps:
        if is_number(line.get("step_seconds")):
            yield line, line["step_seconds"] * max(line["step"] - before, 1)
        before = line["step"]


def _weighed(windows: list[tuple[Body, float]], name: str) -> float | None:
    """The seconds that a share comes to; None where no line tells it."""
    told = [value * spent for line, spent in windows if is_number(value := line.get(name))]
    return sum(told) if told else None


def _checkpoints(facts: Facts) -> float | None:
    """The journal tells the mean of each line, the summary all of the last attempt."""
    told = [value for _, value in facts.curve("checkpoint_seconds")]
    whole = facts.summary.get("checkpoint_seconds")
    known = [*([sum(told)] if told else []), *([whole] if is_number(whole) else [])]
    return max(known, default=None)


def _cells(name: str, found: dict[str, Budget]) -> Iterator[str]:
    for one in found.values():
        value = one.parts.get(name)
        yield seconds(value)
        yield percent(value / one.total) if value is not None else "–"


def _bar(name: str, found: Budget, named: bool) -> Html:
    """Parts beside each other, in one order; each says itself what it is."""
    at, parts = 0.0, []
    for part, spent in found.parts.items():
        width = _WIDTH * spent / found.total
        told = el("title", f"{part}: {seconds(spent)}, {percent(spent / found.total)}")
        parts.append(
            el("rect", told, x=px(at), y=0, width=px(max(width - 1, 0)), height=_BAR, class_=f"part {_KINDS[part]}")
        )
        if width > 110:
            parts.append(label(at + 10, 20, f"{part} {percent(spent / found.total)}", "start inside"))
        at += width
    text = ", ".join(f"{part} {percent(spent / found.total)}" for part, spent in found.parts.items())
    drawn = drawing(f"Time budget of {name}", text, parts, _WIDTH, _BAR, "bar-chart")
    return el("div", el("small", name), drawn) if named else drawn


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


_MOST_ROWS = 64  # bars, of the layers whose last loads are the most uneven


def mixture(facts: Facts) -> Child:
    """Nothing for a model without experts."""
    if not _curve(facts, "load_max_over_mean"):
        return None
    balance = [
        Series("mean of layers", _curve(facts, "load_max_over_mean"), "one", smooth=True),
        Series("worst layer", list(_worst(facts)), "two"),
    ]
    charts = [
        line_chart("Largest load over the mean", balance),
        line_chart("Router entropy", [Series("1: no choice", _curve(facts, "router_entropy"), "three", smooth=True)]),
        _loads(facts),
    ]
    return el("div", charts, pairs(_mixture_figures(facts)), class_="charts")


def _curve(facts: Facts, name: str) -> Points:
    lines = [(line["step"], line["experts"].get(name)) for line in facts.steps if isinstance(line.get("experts"), dict)]
    return [(step, value) for step, value in lines if is_number(value)]


def _worst(facts: Facts) -> Iterator[tuple[float, float]]:
    for line in facts.steps:
        layers = line.get("expert_load_max_over_mean")
        if isinstance(layers, dict) and layers:
            yield line["step"], max(layers.values())


def _mixture_figures(facts: Facts) -> Iterator[tuple[str, str]]:
    yield "largest load over the mean, at last", number(_curve(facts, "load_max_over_mean")[-1][1])
    if entropy := _curve(facts, "router_entropy"):
        yield "router entropy, at last", f"{percent(entropy[-1][1])} of the most there can be"
    yield "dropped tokens", number(sum(value for _, value in _curve(facts, "dropped_tokens")))


def _loads(facts: Facts) -> Html | None:
    """Of the last steps that were told, a bar for each expert."""
    told = [line["expert_loads"] for line in facts.steps if line.get("expert_loads")]
    if not told:
        return None
    layers = sorted(enumerate(told[-1]), key=lambda layer: _peak(layer[1]), reverse=True)
    rows = [
        _row(f"{layer}.{expert}", count, max(loads)) for layer, loads in layers for expert, count in enumerate(loads)
    ]
    caption = el("figcaption", el("b", "Tokens of each expert"), el("span", "layer.expert", class_="legend"))
    return el("figure", caption, el("div", rows[:_MOST_ROWS], class_="times"), class_="tried")


def _row(name: str, count: int, top: int) -> Html:
    bar = el("div", el("i", style=f"width:{100 * count / max(top, 1):.1f}%"))
    return el("div", el("span", name), bar, el("b", number(count)))


def _peak(loads: Sequence[float]) -> float:
    return max(loads) * len(loads) / max(sum(loads), 1)
