"""Section that compares this run with others: numbers, paired differences on the same samples, and their causes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.compare import record_differences
from pipeline.contract.results import Body, Facts, is_number
from pipeline.contract.run import Run
from pipeline.report.charts import interval_chart, parse_range
from pipeline.report.evaluation import describe_outcome
from pipeline.system.errors import PipelineError
from pipeline.system.wording import milliseconds, number, seconds, short, signed

_MAX_PARTS = 40  # shown
_MAX_LABEL = 12  # of a run's name in charts; of a longer one, its end is shown
_DIGEST_LENGTH = 64
_OWN_SOURCES = "pipe:"  # prefix of the parts of a step's key that are sources of pipe itself


@dataclass(frozen=True)
class Comparison:
    """The paired differences of this run's candidate to another's; `problem` is why there are none."""

    metrics: tuple[Body, ...] = ()  # as compare_runs returns them
    problem: str = ""


def run_labels(ids: Sequence[str]) -> list[str]:
    """Return short names for the runs of one report: `this run`, and the last part of the names of the others."""
    ends = [run_id.rpartition("-")[2] if len(run_id) > _MAX_LABEL else run_id for run_id in ids]
    is_repeated = [count > 1 for count in map(Counter(ends).__getitem__, ends)]
    labels = [run_id if repeated else end for run_id, end, repeated in zip(ids, ends, is_repeated, strict=True)]
    return ["this run", *(f"run {name}" for name in labels[1:])]


def compare(run: Run, facts: Facts, other: Run, others: Facts) -> Comparison:
    """Compare two runs sample by sample if both were evaluated on the same test set."""
    if not facts.verdict or not others.verdict:
        return Comparison(problem="one of the runs has not been evaluated")
    from pipeline.evaluate.compare_runs import compare_runs  # imports numpy, which most reports do not need

    try:
        rows = compare_runs(run, other, run.config.evaluate)["metrics"]
    except PipelineError as error:
        return Comparison(problem=str(error))
    return Comparison(tuple(_as_in_verdict(row, facts, others) for row in rows))


def _as_in_verdict(row: Body, facts: Facts, other: Facts) -> Body:
    """Take the interval of the verdict where the other run is the champion that it compares with."""
    verdict, bundle = facts.verdict, other.digests.get("manifest.json")
    if row["metric"] != verdict.get("metric") or not bundle or (verdict.get("baseline") or {}).get("bundle") != bundle:
        return row
    return row | {"difference": verdict.get("difference"), "confidence": verdict.get("confidence", row["confidence"])}


def adjust_p_values(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Correct the p-values for all metrics of all runs that this run is compared with."""
    rows = [row for compared in comparisons for row in compared.metrics]
    if len(comparisons) < 2 or not rows:
        return list(comparisons)
    from pipeline.statistics.significance import holm  # imports numpy

    adjusted = iter(holm([row["p_value"] for row in rows]))
    return [
        replace(compared, metrics=tuple(row | {"adjusted_p": next(adjusted)} for row in compared.metrics))
        for compared in comparisons
    ]


def comparison(runs: Mapping[str, Facts], compared: Sequence[Comparison]) -> Body:
    """List the numbers of all runs, draw the metric of the gate for each other run, and list all metrics."""
    labels, (facts, *others) = list(runs), list(runs.values())
    return {
        "facts": facts,
        "runs": [{"label": label, "facts": other} for label, other in zip(labels[1:], others, strict=True)],
        "outcomes": [describe_outcome(run) for run in runs.values()],
        "labels": labels,
        "rows": list(_rows(facts, others)),
        "paired": [_paired(facts, label, each) for label, each in zip(labels[1:], compared, strict=True)],
        **_differing_parts(facts, others),
    }


def _paired(facts: Facts, label: str, compared: Comparison) -> Body:
    metric = str(facts.verdict.get("metric", ""))
    first = next((row for row in compared.metrics if row["metric"] == metric), next(iter(compared.metrics), None))
    difference = parse_range(first["difference"]) if first else None
    chart = None
    if first and difference:
        title = f"by how much this run is better than {label} in {first['metric']}"
        chart = interval_chart(difference, 0.0, "", f"equal in {first['metric']}", title)
    return {
        "label": label,
        "problem": compared.problem or "the runs have no metric in common",
        "first": first,
        "chart": chart,
        "metrics": [row | {"difference": parse_range(row["difference"])} for row in compared.metrics],
    }


Cell = tuple[str, str]  # value and difference to the first run


def _rows(facts: Facts, others: Sequence[Facts]) -> Iterator[tuple[str, list[Cell]]]:
    """Yield the rows that at least one run has a value for."""
    runs = (facts, *others)
    for name in sorted({name for run in runs for name in run.candidate}):
        yield from _row(name, [run.candidate.get(name) for run in runs], number, _difference)
    for key, name in (("best_step", "best step"), ("samples_per_second", "samples/s"), ("steps", "optimizer steps")):
        yield from _row(name, [run.summary.get(key) for run in runs], number, _difference)
    yield from _row("training", [run.summary.get("seconds") for run in runs], seconds, _ratio)
    yield from _row("latency, median", [run.latency.get("p50") for run in runs], milliseconds, _ratio)


def _row(
    name: str,
    values: Sequence[float | None],
    text: Callable[[float | None], str],
    difference: Callable[[float, float], str],
) -> Iterator[tuple[str, list[Cell]]]:
    numbers = [value if is_number(value) else None for value in values]
    first = numbers[0]
    if any(value is not None for value in numbers):
        differences = ["" if value is None or first is None else difference(value, first) for value in numbers[1:]]
        yield name, list(zip(map(text, numbers), ["", *differences], strict=True))


def _difference(value: float, first: float) -> str:
    return signed(value - first) if value != first else "the same"


def _ratio(value: float, first: float) -> str:
    return f"× {number(value / first, 3)}" if first else ""


def _differing_parts(facts: Facts, others: Sequence[Facts]) -> Body:
    """List each part of the step keys that differs between this run and another once, with its steps."""
    steps: dict[str, list[str]] = {}
    for other in others:
        common = facts.file.steps.keys() & other.file.steps.keys()  # steps that only one run reached are ignored
        for row in record_differences(*({n: run.file.steps[n] for n in common} for run in (other, facts))):
            names = steps.setdefault(row["part"], [])
            names += [row["step"]] if row["step"] not in names else []
    rows = [
        (part, [_part(run, part, names) for run in (facts, *others)], ", ".join(names))
        for part, names in steps.items()
        if not part.startswith(_OWN_SOURCES)
    ]
    return {
        "parts": rows[:_MAX_PARTS],
        "more_parts": max(len(rows) - _MAX_PARTS, 0),
        "own_sources": len(steps) - len(rows),
    }


def _part(facts: Facts, part: str, steps: Sequence[str]) -> str:
    """Return the value of a part in the first of these steps that the run has."""
    records = (facts.file.steps[step] for step in steps if step in facts.file.steps)
    value = next((record.parts[part] for record in records if part in record.parts), None)
    if value is None:
        return "default" if part.startswith("config:") else "absent"
    return short(value) if len(value) == _DIGEST_LENGTH else value
