"""Sections of the train step: learning curves, where the time went, throughput, and the balance of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from pipeline.contract.results import Body, Facts, is_number
from pipeline.report.charts import RUN_STYLES, Chart, Label, Points, Rectangle, Series, Shape, line_chart
from pipeline.system.wording import MISSING, number, percent, seconds, size

Runs: TypeAlias = Mapping[str, Facts]  # by their names in the report; first the run that it is about

_BUDGET_WIDTH, _BUDGET_HEIGHT = 960, 30
_MIN_LABELLED_WIDTH = 110  # of a part of the time budget
_REST = "validation and the rest"
_BUDGET_STYLES = {"computing": "one", "communication": "two", "data": "three", "checkpoints": "four", _REST: "five"}
_CURVE_STYLES = ("one", "two", "three")
_SHARES = {
    "data_wait_share": "waiting for data",
    "gpu_utilization": "GPU utilization",
    "mfu": "model FLOPs utilization",
}
_PEAKS = {
    "memory_bytes": "peak GPU memory of a process, allocated by torch",
    "resident_bytes": "peak resident memory of a process",
}
_MAX_PROCESSES = 6  # drawn; with more, only the largest and the smallest value are
_MAX_EXPERTS = 64  # drawn, from the layers with the most uneven loads


def curves(runs: Runs) -> Body | None:
    """Draw the curves of a run, or one curve per run in each chart."""
    facts = next(iter(runs.values()))
    if not facts.steps and not facts.validations:
        return None
    best = facts.summary.get("best_step")
    best_of_loss, best_of_metric = ((float(best), f"best at {best}"), (float(best), "")) if best else (None, None)
    if len(runs) == 1:
        charts = [line_chart("Loss", _losses(facts), "loss", best_of_loss)]
    else:
        charts = [
            line_chart("Training loss", _series(runs, "one", lambda run: run.curve("loss"), smooth=True), "loss"),
            line_chart(
                "Validation loss", _series(runs, "two", lambda run: _validation(run, "loss"), dots=True), "loss"
            ),
        ]
    for name in sorted({name for run in runs.values() for line in run.validations for name in line["validation"]}):
        if name != "loss":
            lines = _series(runs, "two", lambda run, name=name: _validation(run, name), name, dots=True)  # type: ignore[misc]
            charts.append(line_chart(f"Validation {name}", lines, name, best_of_metric if len(runs) == 1 else None))
    rates = _series(runs, "three", lambda run: run.curve("lr"), "learning rate")
    norms = _series(runs, "three", lambda run: run.curve("grad_norm"), "norm", smooth=True)
    charts += [
        line_chart("Learning rate", rates, "learning rate"),
        line_chart("Gradient norm", norms, "norm of the gradients"),
    ]
    return {"charts": charts, "summary": list(_summary(facts.summary))}


def _losses(run: Facts) -> list[Series]:
    return [
        Series("training", run.curve("loss"), "one", smooth=True),
        Series("validation", _validation(run, "loss"), "two", dots=True),
    ]


def _series(
    runs: Runs, style: str, read: Callable[[Facts], Points], name: str = "", dots: bool = False, smooth: bool = False
) -> list[Series]:
    """Return one curve per run, named and coloured by run if there are several."""
    if len(runs) == 1:
        return [Series(name, read(run), style, dots, smooth) for run in runs.values()]
    return [
        Series(label, read(run), RUN_STYLES[place], dots, smooth, place)
        for place, (label, run) in enumerate(runs.items())
    ]


def _validation(facts: Facts, name: str) -> Points:
    values = ((line["step"], line["validation"].get(name)) for line in facts.validations)
    return [(step, value) for step, value in values if is_number(value)]


def _summary(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if not summary:
        return
    yield "processes", f"{summary.get('world_size', '?')} × {str(summary.get('device', '?')).upper()}"
    if "batch_size" in summary:
        yield "batch size", number(summary["batch_size"])
    yield "precision", str(summary.get("precision", "?"))
    yield "optimizer steps", number(summary.get("steps")) + (" (stopped early)" if summary.get("stopped_early") else "")
    if restarts := summary.get("restarts"):
        times = "once" if restarts == 1 else f"{restarts} times"
        yield "restarted", f"{times} automatically, {seconds(summary.get('seconds_lost'))} without a step"
    best = sorted((summary.get("best_validation") or {}).items())
    yield "best validation", ", ".join(f"{name} {number(value)}" for name, value in best)
    if lost := summary.get("lost_best"):
        yield "lost", f"the better checkpoint of step {lost['step']}, which was damaged"
    if since := summary.get("best_since"):
        yield "best of those since", f"step {since}, where the validation data or the code changed"


@dataclass(frozen=True)
class Budget:
    """The seconds of the first process, by what they were spent on."""

    parts: dict[str, float]
    complete: bool  # the time between the steps is known too

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    def share(self, part: str) -> str:
        return percent(self.parts[part] / self.total) if part in self.parts else MISSING


def time_budget(facts: Facts) -> Budget | None:
    """Read the time budget from the training log, each line of which covers the steps since the line before."""
    windows = list(_windows(facts))
    step_total = sum(duration for _, duration in windows)
    if not step_total:
        return None
    measured_share = exposed_communication(facts)
    waits = {
        "data": _weighted_seconds(windows, "data_wait_share"),
        "communication": _weighted_seconds(windows, "communication_share")
        or (measured_share and measured_share[0] * step_total),
        "checkpoints": _checkpoint_seconds(facts),
    }
    measured = {name: duration for name, duration in waits.items() if duration is not None}
    # A pause for a checkpoint is inside the steps of the line that reports it.
    parts = {"computing": max(0.0, step_total - sum(measured.values())), **measured}
    total_seconds = facts.summary.get("seconds")
    if is_number(total_seconds) and total_seconds >= step_total:  # after a resume it covers the last attempt only
        parts[_REST] = max(0.0, total_seconds - sum(parts.values()))
    return Budget({name: parts[name] for name in _BUDGET_STYLES if name in parts}, _REST in parts)


def exposed_communication(facts: Facts) -> tuple[float, str] | None:
    """Return the fraction of time spent waiting for communication, and how it was measured."""
    if rank_shares := [rank["exposed"] for name, rank in facts.communication.items() if name.startswith("rank ")]:
        first_step, count = facts.communication["first_step"], facts.communication["steps"]
        return sum(rank_shares) / len(rank_shares), f"timeline of steps {first_step} to {first_step + count - 1}"
    if shares := _values(facts, "communication_share"):
        return sum(shares) / len(shares), "mean of all steps"
    return None


def _windows(facts: Facts) -> Iterator[tuple[Body, float]]:
    """Yield the lines of the training log, each with the seconds it covers."""
    previous_step = 0
    for line in facts.steps:
        if is_number(line.get("step_seconds")):
            yield line, line["step_seconds"] * max(line["step"] - previous_step, 1)
        previous_step = line["step"]


def _weighted_seconds(windows: list[tuple[Body, float]], name: str) -> float | None:
    """Return the seconds a logged fraction amounts to; None if no line has it."""
    parts = [fraction * duration for line, duration in windows if is_number(fraction := line.get(name))]
    return sum(parts) if parts else None


def _checkpoint_seconds(facts: Facts) -> float | None:
    """Return the larger of two totals: that of the log's lines, and that of the last attempt in the summary."""
    seconds_of_lines = _values(facts, "checkpoint_seconds")
    total = facts.summary.get("checkpoint_seconds")
    return max(
        [*([sum(seconds_of_lines)] if seconds_of_lines else []), *([total] if is_number(total) else [])], default=None
    )


def _values(facts: Facts, name: str) -> list[float]:
    return [value for _, value in facts.curve(name)]


def _time_budgets(runs: Runs) -> Body | None:
    budgets = {name: budget for name, run in runs.items() if (budget := time_budget(run))}
    if not budgets:
        return None
    is_comparison = len(budgets) > 1
    rows = [
        {
            "name": part,
            "style": style,
            "cells": [
                cell for budget in budgets.values() for cell in (seconds(budget.parts.get(part)), budget.share(part))
            ],
        }
        for part, style in _BUDGET_STYLES.items()
        if any(part in budget.parts for budget in budgets.values())
    ]
    return {
        "complete": all(budget.complete for budget in budgets.values()),
        "bars": [(name if is_comparison else "", _budget_bar(name, budget)) for name, budget in budgets.items()],
        "head": ["", *[word for name in budgets for word in (name if is_comparison else "time", "share")]],
        "rows": rows,
        "totals": [cell for budget in budgets.values() for cell in (seconds(budget.total), "100%")],
    }


def _budget_bar(name: str, budget: Budget) -> Chart:
    """Draw all parts side by side in a fixed order, each labelled if there is room."""
    x, shapes = 0.0, list[Shape]()
    for part, duration in budget.parts.items():
        width = _BUDGET_WIDTH * duration / budget.total
        tooltip = f"{part}: {seconds(duration)}, {budget.share(part)}"
        shapes.append(Rectangle(x, 0, max(width - 1, 0), _BUDGET_HEIGHT, f"part {_BUDGET_STYLES[part]}", tooltip))
        if width > _MIN_LABELLED_WIDTH:
            shapes.append(Label(x + 10, 20, f"{part} {budget.share(part)}", "start inside"))
        x += width
    text = ", ".join(f"{part} {budget.share(part)}" for part in budget.parts)
    return Chart(f"Time budget of {name}", text, shapes, _BUDGET_WIDTH, _BUDGET_HEIGHT, "bar-chart")


def speed(runs: Runs) -> Body | None:
    facts = next(iter(runs.values()))
    if not facts.steps:
        return None
    timings = facts.batch_size.get("timed")
    fastest = max(entry["samples_per_second"] for entry in timings) if timings else 0.0
    speeds = _series(runs, "one", lambda run: run.curve("samples_per_second"), "samples/s", smooth=True)
    waits = _series(runs, "two", lambda run: run.curve("communication_share"), "share of time", smooth=True)
    return {
        "budget": _time_budgets(runs),
        "charts": [
            line_chart("Throughput", speeds, "samples per second"),
            line_chart("Exposed communication", waits, "share of time"),
            line_chart("Shares of a batch", _batch_shares(facts), "share of the batch"),
        ],
        "batch_sizes": [
            (
                number(entry["batch_size"]),
                100 * entry["samples_per_second"] / fastest,
                number(entry["samples_per_second"]),
                "taken" if entry["batch_size"] == facts.batch_size["batch_size"] else "",
            )
            for entry in timings or ()
        ],
        "figures": list(_figures(facts)),
        "timeline": facts.timeline,
    }


def _figures(facts: Facts) -> Iterator[tuple[str, str]]:
    if facts.batch_size:
        chosen = number(facts.batch_size.get("batch_size"))
        yield "batch size", f"{chosen}, the fastest of those tried, limited by {facts.batch_size.get('limit')}"
    if communication := exposed_communication(facts):
        yield "exposed communication", f"{percent(communication[0])} ({communication[1]})"
    if sent := _values(facts, "sent_bytes_per_step"):
        yield "sent by the first process", f"{size(sum(sent) / len(sent))} per step"
    if times := sorted(_values(facts, "step_seconds")):
        yield "median step", seconds(times[len(times) // 2])
    if pauses := sorted(_values(facts, "checkpoint_seconds")):
        yield "median pause for a checkpoint", seconds(pauses[len(pauses) // 2])
    yield from ((title, size(facts.summary[name])) for name, title in _PEAKS.items() if name in facts.summary)
    for name, title in _SHARES.items():
        if shares := _values(facts, name):
            yield title, percent(sum(shares) / len(shares))
    scaling = facts.summary or facts.steps[-1]
    if "overflow_steps" in scaling:
        yield "steps skipped for overflow", number(scaling["overflow_steps"])
        yield "loss scale", number(scaling.get("loss_scale"))


def _batch_shares(facts: Facts) -> list[Series]:
    """The share of each process, if shares follow the speed of the processes."""
    lines = [(line["step"], line["batch_share"]) for line in facts.steps if isinstance(line.get("batch_share"), dict)]
    names = list(lines[0][1]) if lines else []
    if len(names) <= _MAX_PROCESSES:
        shares = {name: [(step, values.get(name, 0.0)) for step, values in lines] for name in names}
    else:
        extremes = {"largest": max, "smallest": min}
        shares = {name: [(step, pick(values.values())) for step, values in lines] for name, pick in extremes.items()}
    return [
        Series(name, points, _CURVE_STYLES[i % len(_CURVE_STYLES)]) for i, (name, points) in enumerate(shares.items())
    ]


def experts(facts: Facts) -> Body | None:
    """Return the balance of experts; None for a model without them."""
    balance = _expert_curve(facts, "load_max_over_mean")
    if not balance:
        return None
    entropy = _expert_curve(facts, "router_entropy")
    figures = [("largest load over the mean, at last", number(balance[-1][1]))]
    if entropy:
        figures.append(("router entropy, at last", f"{percent(entropy[-1][1])} of the maximum"))
    figures.append(("dropped tokens", number(sum(value for _, value in _expert_curve(facts, "dropped_tokens")))))
    loads = [
        Series("mean of layers", balance, "one", smooth=True),
        Series("worst layer", list(_worst_layer(facts)), "two"),
    ]
    return {
        "charts": [
            line_chart("Largest load over the mean", loads, "load ÷ mean load"),
            line_chart("Router entropy", [Series("1: uniform", entropy, "three", smooth=True)], "share of the maximum"),
        ],
        "tokens": list(_expert_tokens(facts))[:_MAX_EXPERTS],
        "figures": figures,
    }


def _expert_curve(facts: Facts, name: str) -> Points:
    lines = [(line["step"], line["experts"].get(name)) for line in facts.steps if isinstance(line.get("experts"), dict)]
    return [(step, value) for step, value in lines if is_number(value)]


def _worst_layer(facts: Facts) -> Iterator[tuple[float, float]]:
    for line in facts.steps:
        layers = line.get("expert_load_max_over_mean")
        if isinstance(layers, dict) and layers:
            yield line["step"], max(layers.values())


def _expert_tokens(facts: Facts) -> Iterator[tuple[str, float, str, str]]:
    """Yield a bar for each expert from the last logged loads, the most uneven layers first."""
    loads_by_line = [line["expert_loads"] for line in facts.steps if line.get("expert_loads")]
    layers = sorted(
        enumerate(loads_by_line[-1] if loads_by_line else ()), key=lambda layer: _imbalance(layer[1]), reverse=True
    )
    for layer, loads in layers:
        for expert, count in enumerate(loads):
            yield f"{layer}.{expert}", 100 * count / max(*loads, 1), number(count), ""


def _imbalance(loads: Sequence[float]) -> float:
    return max(loads) * len(loads) / max(sum(loads), 1)
