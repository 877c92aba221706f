"""Compare the stored predictions of two runs sample by sample, on the test set that both were evaluated on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from pipeline.contract.results import finite_or_none
from pipeline.contract.run import Run
from pipeline.contract.settings.stages import Evaluate
from pipeline.evaluate.rules import digits
from pipeline.statistics.metrics import Metric, compute_metrics
from pipeline.statistics.scores import ACTUAL, BASELINE, CANDIDATE, Columns
from pipeline.statistics.significance import detectable_difference, holm, mcnemar, permutation_p_value
from pipeline.system.errors import DataError
from pipeline.system.files import digest_file, read_object


def compare_runs(first: Run, second: Run, config: Evaluate) -> dict[str, Any]:
    """Compare every metric that both runs have, `first` minus `second`."""
    first_columns, second_columns = read_predictions(first), read_predictions(second)
    bodies = [_read_metrics(run) for run in (first, second)]
    fingerprints = [str(body.get("test_fingerprint", "")) for body in bodies]
    if fingerprints[0] != fingerprints[1] or not fingerprints[0]:
        raise DataError(
            f"runs {first.id} and {second.id} were evaluated on different test data (fingerprints "
            f"{_short(fingerprints[0])} and {_short(fingerprints[1])}), so their samples cannot be paired; to fix it: "
            "evaluate both on the same data"
        )
    classes = bodies[0].get("classes")
    columns = _pair_columns(first_columns, second_columns, classes == bodies[1].get("classes"))
    metrics = compute_metrics(columns, classes, True, _lower_is_better(*bodies), config.named_metrics)
    rows = [_row(metric, config) for metric in metrics.values() if metric.candidate and metric.baseline]
    for row, adjusted in zip(rows, holm([row["p_value"] for row in rows]), strict=True):
        row["adjusted_p"] = adjusted
    return {"run": first.id, "against": second.id, "test_fingerprint": fingerprints[0], "metrics": rows}


def describe_comparison(comparison: Mapping[str, Any]) -> Iterator[str]:
    test = _short(comparison["test_fingerprint"])
    yield f"run {comparison['run']} against run {comparison['against']}, on the same test samples ({test})"
    for row in comparison["metrics"]:
        if row["difference"] is None:
            yield f"{row['metric']}: cannot be compared, a value is not finite or undefined"
        else:
            significance = _significance_text(row, len(comparison["metrics"]))
            yield f"{_difference_text(row)}, {significance}{_detectable_text(row)}"
        if row["mcnemar"]:
            test = row["mcnemar"]
            yield (
                f"  McNemar's exact test: p = {test['p_value']:.3g}; {test['only_candidate']} samples only the first "
                f"gets right, {test['only_baseline']} only the second"
            )


def _difference_text(row: Mapping[str, Any]) -> str:
    difference = row["difference"]
    ends = sorted(math.copysign(1, difference["estimate"]) * difference[end] for end in ("low", "high"))
    bounds = f"{digits(ends[0], sign=True)} to {digits(ends[1], sign=True)}"
    return (
        f"{row['metric']} {digits(row['candidate'])} against {digits(row['baseline'])}: "
        f"{_direction(difference['estimate'])} ({row['confidence']:.0%} interval {bounds})"
    )


def _significance_text(row: Mapping[str, Any], metrics: int) -> str:
    outcome = "significant" if row["adjusted_p"] < 1 - row["confidence"] else "not significant"
    return f"{outcome} (adjusted p = {row['adjusted_p']:.3g} over {metrics} metrics)"


def _detectable_text(row: Mapping[str, Any]) -> str:
    if row["detectable"] is None:
        return ""
    return f"; {row['samples']} {row['unit']} can show a difference of {row['detectable']:.3g}"


def read_predictions(run: Run) -> Columns:
    """Read the per-sample predictions of a run; files that changed since the evaluation are rejected."""
    path = run.output("evaluate") / "predictions.npz"
    if not path.is_file():
        raise DataError(f"run {run.id} has no per-sample predictions; to fix it: `pipe run --resume {run.id}`")
    record = run.read().steps.get("evaluate")
    for file in (path, path.with_name("metrics.json")):
        if record is not None and record.outputs.get(file.name) not in (None, digest_file(file)):
            raise DataError(f"{file}: changed since the evaluation; to fix it: evaluate the run again")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (ValueError, OSError, EOFError) as error:
        raise DataError(f"{path}: cannot be read ({error}); to fix it: evaluate the run again") from error


def _pair_columns(first: Columns, second: Columns, same_classes: bool) -> Columns:
    """Return the columns of the first run, with the second run's candidate as the baseline."""
    for name in (name for name in first.keys() & second.keys() if "." not in name):
        if not np.array_equal(first[name], second[name]):
            raise DataError(f"the two runs have different labels for the same samples ({name}): the task changed")
    if ACTUAL in first and not same_classes:
        raise DataError("the two runs have different classes, so their samples cannot be paired")
    columns = {name: values for name, values in first.items() if not name.startswith((CANDIDATE, BASELINE))}
    for name in first.keys() & second.keys():
        if name.startswith(CANDIDATE):
            columns[name] = first[name]
            columns[BASELINE + name.removeprefix(CANDIDATE)] = second[name]
    ordered = [name for name in first if name in columns]
    return {name: columns[name] for name in [*ordered, *sorted(columns.keys() - set(ordered))]}


def _lower_is_better(first: Mapping[str, Any], second: Mapping[str, Any]) -> frozenset[str]:
    names = [frozenset(body.get("lower_is_better") or ()) for body in (first, second)]
    shared = (first.get("candidate") or {}).keys() & (second.get("candidate") or {}).keys()
    if differing := sorted((names[0] ^ names[1]) & shared):
        raise DataError(f"{differing[0]} is better lower in one run and higher in the other: the task changed")
    return names[0]


def _row(metric: Metric, config: Evaluate) -> dict[str, Any]:
    difference = metric.difference(config.confidence)
    values = metric.contributions()
    is_finite = difference is not None and math.isfinite(float(values.sum()))
    detectable = detectable_difference(values, config.confidence) if is_finite else math.inf
    return {
        "metric": metric.name,
        "candidate": finite_or_none(metric.value("candidate")),
        "baseline": finite_or_none(metric.value("baseline")),
        "difference": asdict(difference) if is_finite and difference is not None else None,
        "confidence": config.confidence,
        "p_value": permutation_p_value(values) if is_finite else 1.0,
        "mcnemar": _mcnemar(metric),
        "samples": metric.units,
        "unit": metric.unit,
        "detectable": finite_or_none(detectable),
        "lower_is_better": metric.lower,
    }


def _mcnemar(metric: Metric) -> dict[str, Any] | None:
    candidate, baseline = metric.slices or (None, None)
    test = None if candidate is None or baseline is None else mcnemar(candidate, baseline)
    return None if test is None else asdict(test)


def _read_metrics(run: Run) -> dict[str, Any]:
    metrics: dict[str, Any] = read_object(run.output("evaluate") / "metrics.json")
    return metrics


def _short(fingerprint: str) -> str:
    return fingerprint[:12] or "none"


def _direction(estimate: float) -> str:
    return f"{'better' if estimate > 0 else 'worse'} by {digits(abs(estimate))}" if estimate else "the same on average"
