"""Section that compares this run with another: numbers, paired differences on the same samples, and their causes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pipeline.compare import record_differences
from pipeline.contract.errors import PipelineError
from pipeline.contract.facts import Body, Facts, is_number
from pipeline.contract.html import Html, number, seconds, signed
from pipeline.contract.run import Run
from pipeline.report.charts import interval_chart, interval_text, parse_range, shared_axis, small_interval
from pipeline.report.rendering import render

_MAX_PARTS = 40  # shown
_OWN_SOURCES = "pipe:"  # prefix of the parts of a step's key that are sources of pipe itself


@dataclass(frozen=True)
class Comparison:
    """The paired differences of this run's candidate to the other's; `problem` is why there are none."""

    metrics: tuple[Body, ...] = ()  # as compare_runs returns them
    problem: str = ""


def compare(run: Run, facts: Facts, other: Run, others: Facts) -> Comparison:
    """Compare two runs sample by sample if both were evaluated on the same test set."""
    if not facts.verdict or not others.verdict:
        return Comparison(problem="one of the runs has not been evaluated")
    from pipeline.evaluate.compare_runs import compare_runs  # imports numpy, which most reports do not need

    try:
        return Comparison(tuple(compare_runs(run, other, run.config.evaluate)["metrics"]))
    except PipelineError as error:
        return Comparison(problem=str(error))


def comparison(facts: Facts, other: Facts, compared: Comparison) -> Html:
    """Draw the metric of the gate, and list all metrics in a table."""
    metric = str(facts.verdict.get("metric", ""))
    gate_metric = next((row for row in compared.metrics if row["metric"] == metric), next(iter(compared.metrics), None))
    difference = parse_range(gate_metric["difference"]) if gate_metric else None
    return render(
        "comparison.html",
        facts=facts,
        other=other,
        rows=[row for row in _rows(facts, other) if row[1:3] != ("–", "–")],
        problem=compared.problem or "the runs have no metric in common",
        first=gate_metric,
        chart=interval_chart(difference, 0.0, "", f"equal in {gate_metric['metric']}")
        if gate_metric and difference
        else "",
        metrics=[_metric_row(row) for row in compared.metrics],
        **_differing_parts(facts, other),
    )


def _metric_row(row: Body) -> dict[str, Any]:
    difference = parse_range(row["difference"])
    return {
        "name": row["metric"],
        "difference": interval_text(difference) or "–",
        "chart": small_interval(difference, shared_axis([difference])),
        "adjusted_p": row["adjusted_p"],
    }


def _rows(facts: Facts, other: Facts) -> Iterator[tuple[str, str, str, str]]:
    values, other_values = ((run.metrics.get("candidate") or {}) for run in (facts, other))
    for name in sorted(values.keys() | other_values.keys()):
        yield _number_row(name, values.get(name), other_values.get(name))
    for key, name in (("best_step", "best step"), ("samples_per_second", "samples/s"), ("steps", "optimizer steps")):
        yield _number_row(name, facts.summary.get(key), other.summary.get(key))
    duration, other_duration = (run.summary.get("seconds") for run in (facts, other))
    yield "training", seconds(duration), seconds(other_duration), _ratio(duration, other_duration)
    duration, other_duration = ((run.deploy.get("latency_ms") or {}).get("p50") for run in (facts, other))
    yield "latency, median", _milliseconds(duration), _milliseconds(other_duration), _ratio(duration, other_duration)


def _number_row(name: str, value: float | None, other_value: float | None) -> tuple[str, str, str, str]:
    if not (is_number(value) and is_number(other_value)):
        difference = "–"
    elif abs(value - other_value) < 10:
        difference = signed(value - other_value)
    else:
        difference = f"{'+' if value > other_value else '−'}{number(abs(value - other_value))}"
    return name, number(value), number(other_value), difference


def _milliseconds(value: float | None) -> str:
    return "–" if value is None else f"{number(value, 3)} ms"


def _ratio(value: float | None, other_value: float | None) -> str:
    return f"× {value / other_value:.2f}" if value and other_value else "–"


def _differing_parts(facts: Facts, other: Facts) -> dict[str, Any]:
    """List each differing part of the step keys once, with its steps; steps that only one run reached are ignored."""
    records, other_records = facts.file.steps, other.file.steps
    common = records.keys() & other_records.keys()
    steps: dict[tuple[str, str, str], list[str]] = {}
    for row in record_differences(
        {n: other_records[n] for n in other_records if n in common}, {n: records[n] for n in records if n in common}
    ):
        steps.setdefault((row["part"], row["after"], row["before"]), []).append(row["step"])
    rows = [(*part, ", ".join(names)) for part, names in steps.items() if not part[0].startswith(_OWN_SOURCES)]
    return {
        "parts": rows[:_MAX_PARTS],
        "more_parts": max(len(rows) - _MAX_PARTS, 0),
        "own_sources": len(steps) - len(rows),
    }
