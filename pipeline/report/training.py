"""How training went: learning curves, beside those of another run where there is one, and what was best."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.report.charts import Points, Series, line_chart
from pipeline.spec.facts import Facts, is_number
from pipeline.spec.html import Child, Html, el, flat, pairs
from pipeline.spec.wording import number, seconds


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
