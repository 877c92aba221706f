"""How training went: learning curves, and what was best."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.report.charts import Points, Series, line_chart
from pipeline.report.facts import Facts, is_number
from pipeline.report.wording import number, seconds
from pipeline.spec.html import Child, Html, el, pairs


def curves(facts: Facts) -> Child:
    if not facts.steps and not facts.validations:
        return None
    best = facts.summary.get("best_step")
    best_loss, best_other = ((float(best), f"best at {best}"), (float(best), "")) if best else (None, None)
    losses = [
        Series("training", facts.curve("loss"), "one", smooth=True),
        Series("validation", _validation(facts, "loss"), "two", dots=True),
    ]
    names = sorted({name for line in facts.validations for name in line["validation"]} - {"loss"})
    charts: list[Html | None] = [line_chart("Loss", losses, best_loss)]
    charts += [
        line_chart(f"Validation {name}", [Series(name, _validation(facts, name), "two", dots=True)], best_other)
        for name in names
    ]
    charts += [
        line_chart("Learning rate", [Series("lr", facts.curve("lr"), "three")]),
        line_chart("Gradient norm", [Series("norm", facts.curve("grad_norm"), "three", smooth=True)]),
    ]
    return el("div", charts, _summary(facts), class_="charts")


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
