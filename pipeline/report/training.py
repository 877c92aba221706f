"""How training went: learning curves, speed, and what was best."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.report.charts import Points, Series, line_chart
from pipeline.report.facts import Body, Facts
from pipeline.report.html import Child, Html, el, pairs
from pipeline.report.wording import number, percent, seconds


def curves(facts: Facts) -> Child:
    if not facts.steps and not facts.validations:
        return None
    best = facts.summary.get("best_step")
    best_loss, best_other = ((float(best), f"best at {best}"), (float(best), "")) if best else (None, None)
    losses = [
        Series("training", _points(facts.steps, "loss"), "one", smooth=True),
        Series("validation", _validation(facts, "loss"), "two", dots=True),
    ]
    names = sorted({name for line in facts.validations for name in line["validation"]} - {"loss"})
    charts: list[Html | None] = [line_chart("Loss", losses, best_loss)]
    charts += [
        line_chart(f"Validation {name}", [Series(name, _validation(facts, name), "two", dots=True)], best_other)
        for name in names
    ]
    charts += [
        line_chart("Learning rate", [Series("lr", _points(facts.steps, "lr"), "three")]),
        line_chart("Throughput", [Series("samples/s", _points(facts.steps, "samples_per_second"), "one", smooth=True)]),
        line_chart("Gradient norm", [Series("norm", _points(facts.steps, "grad_norm"), "three", smooth=True)]),
    ]
    return el("div", charts, _summary(facts), class_="charts")


def _points(lines: tuple[Body, ...], name: str) -> Points:
    return [(line["step"], line[name]) for line in lines if _is_number(line.get(name))]


def _validation(facts: Facts, name: str) -> Points:
    found = ((line["step"], line["validation"].get(name)) for line in facts.validations)
    return [(step, value) for step, value in found if _is_number(value)]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _summary(facts: Facts) -> Html | None:
    if not facts.summary:
        return None
    waits = [line["data_wait_share"] for line in facts.steps if _is_number(line.get("data_wait_share"))]
    times = sorted(line["step_seconds"] for line in facts.steps if _is_number(line.get("step_seconds")))
    rows = {
        "processes": f"{facts.summary.get('world_size', '?')} × {str(facts.summary.get('device', '?')).upper()}",
        "precision": str(facts.summary.get("precision", "?")),
        "optimizer steps": number(facts.summary.get("steps"))
        + (" (stopped early)" if facts.summary.get("stopped_early") else ""),
        "median step": seconds(times[len(times) // 2]) if times else None,
        "waiting for data": percent(sum(waits) / len(waits)) if waits else None,
        "best validation": _values(facts.summary.get("best_validation") or {}),
    }
    return pairs(rows.items())


def _values(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in sorted(values.items()))
