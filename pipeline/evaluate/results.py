"""Results of an evaluation: from per-sample columns to metrics.json, verdict.json and their explanation in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import scipy  # type: ignore[import-untyped]

from pipeline.contract.bundle import passed_gate
from pipeline.contract.registry import FIRST_COMPARISON, ComparisonCount
from pipeline.contract.results import finite_or_none
from pipeline.contract.settings.stages import Evaluate
from pipeline.evaluate.calibration import Calibration, brier_gain, interval_bounds, measure_calibration
from pipeline.evaluate.codec_check import CodecCheck
from pipeline.evaluate.compared_data import DataChange
from pipeline.evaluate.gate import Measurements, Verdict
from pipeline.evaluate.rules import Comparison, digits, interval_level, samples_needed
from pipeline.evaluate.slices import MAX_NAMES, MIN_SLICE_SAMPLES, Group, Slice, compare_slices, slice_groups
from pipeline.statistics.aggregates import Mean
from pipeline.statistics.intervals import Interval
from pipeline.statistics.metrics import Metric, by_horizon, class_metrics, compute_metrics, confusion, metric_values
from pipeline.statistics.scores import (
    ACTUAL,
    BASELINE,
    CANDIDATE,
    OUTPUTS,
    PREDICTED,
    PROBABILITIES,
    QUERY,
    SLICE,
    Array,
    Columns,
)
from pipeline.statistics.significance import (
    McNemar,
    confidence_text,
    detectable_difference,
    mcnemar,
    permutation_p_value,
    worst_losses,
)
from pipeline.system.errors import ConfigError, DataError
from pipeline.system.wording import join_names


@dataclass(frozen=True)
class Results:
    columns: Columns  # as stored in predictions.npz
    kind: Literal["champion", "task"] | None  # of baseline, if there is one
    bundle: str | None  # digest of the champion's bundle
    classes: Sequence[str] | None
    lower: frozenset[str] = frozenset()  # metrics of the task where lower is better
    data: DataChange | None = None  # against the champion's test set
    codec: CodecCheck | None = None
    copies: tuple[int, ...] = ()  # test samples that are copies of a training sample, or of an earlier one
    named: frozenset[str] = frozenset()  # metrics that decide
    training: str = ""  # what the verdict must say of the training

    @cached_property
    def candidate(self) -> Columns:
        """The metrics of the task, one value per sample."""
        return self._metrics(CANDIDATE)

    @cached_property
    def baseline(self) -> Columns | None:
        return self._metrics(BASELINE) if self.kind else None

    @cached_property
    def metrics(self) -> dict[str, Metric]:
        return compute_metrics(self.columns, self.classes, self.kind is not None, self.lower, self.named)

    @property
    def samples(self) -> int:
        return len(next(iter(self.columns.values())))

    def check(self, config: Evaluate) -> None:
        """Check that the compared metric exists and that candidate and baseline have the same metrics."""
        if self.baseline is not None and (differing := sorted(self.candidate.keys() ^ self.baseline.keys())):
            raise DataError(f"metrics(): {', '.join(differing)} is returned for only one of candidate and baseline")
        if unknown := sorted(self.lower - self.candidate.keys()):
            raise ConfigError(f"directions of the task: metrics() returns no {unknown[0]}")
        required = {"evaluate.metric": [config.metric], "evaluate.require": config.metric_limits}
        for setting, names in required.items():
            if missing := sorted(set(names) - self.metrics.keys()):
                known, shape = ", ".join(self.metrics), self.columns.get(ACTUAL, np.empty(0)).shape
                known += f", also for each horizon, as mae_1 to mae_{shape[1]}" if len(shape) > 1 else ""
                raise ConfigError(
                    f"{setting}: the task has no metric {missing[0]} (it has {known}); to fix it: name one of these, "
                    "or give the task the methods that other metrics need"
                )
        if config.calibration_limits and CANDIDATE + PROBABILITIES not in self.columns:
            names = ", ".join(config.calibration_limits)
            raise ConfigError(f"evaluate.require: {names} needs a classifier whose task has probabilities(outputs)")

    def measurements(self, config: Evaluate, count: ComparisonCount = FIRST_COMPARISON) -> Measurements:
        """Return all values that the rules use."""
        metrics = self.metrics
        baseline = None if self.kind is None else metric_values(metrics, "baseline")
        calibration = self.calibration(config)
        slices = self.slices(config)
        weak = find_weak_slices(self.columns, self.classes, self._groups(None))
        notes = (*(metric.note for metric in metrics.values()), weak, count.unrecorded, self.training)
        return Measurements(
            samples=self.samples,
            candidate=metric_values(metrics, "candidate"),
            baseline=baseline,
            lower=frozenset(name for name, metric in metrics.items() if metric.lower),
            undefined={name: metric.why for name, metric in metrics.items() if metric.why},
            notes=tuple(filter(None, notes)),
            comparison=self.comparison(config, count),
            count=count,
            slices=slices,
            data=self.data,
            codec=self.codec,
            doubts=tuple(find_doubts(config, self.columns, self.classes, metrics, slices, self.kind is not None)),
            calibration=calibration.get("candidate"),
            baseline_calibration=calibration.get("baseline"),
            brier_gain=self._brier_gain(config) if "baseline" in calibration else None,
            near_duplicates=len(self.copies),
            without_copies=self._without_copies(config, count),
        )

    @cached_property
    def _distinct(self) -> Array:
        """Return which samples are no copies, nor have one in their query."""
        is_copy = np.zeros(self.samples, dtype=bool)
        is_copy[list(self.copies)] = True
        query = self.columns.get(QUERY)
        return ~(is_copy if query is None else np.isin(query, query[is_copy]))

    def _without_copies(self, config: Evaluate, count: ComparisonCount) -> Measurements | None:
        if self._distinct.all() or not self._distinct.any():
            return None
        columns = {name: values[self._distinct] for name, values in self.columns.items()}
        return replace(self, columns=columns, copies=()).measurements(config, count)

    def comparison(self, config: Evaluate, count: ComparisonCount) -> Comparison | None:
        """Return None without a baseline, or if a value is undefined or not finite: the gate then reports why."""
        metric = self.metrics[config.metric]
        if self.kind is None or metric.candidate is None:
            return None
        level = interval_level(config, count)
        difference = metric.difference(level)
        if difference is None:
            return None
        values = metric.contributions()
        return Comparison(
            samples=len(values),
            difference=difference,
            detectable=detectable_difference(values, level),
            p_value=permutation_p_value(values),
            unit=metric.unit,
            count=count,
            single=metric.difference(config.confidence) if level != config.confidence else None,
            worst=None if metric.has_limits else worst_losses(values, metric.differing),
        )

    def slices(self, config: Evaluate) -> tuple[Slice, ...]:
        """Compare slices by the decisive metric; one without a value per sample cannot be compared by slice."""
        groups = self._groups(self.classes if config.class_slices else None)
        values = self.metrics[config.metric].slices
        if values is None:
            reason = f"{config.metric} has no value per sample; not evaluated"
            return tuple(
                Slice(group.name, len(group.members), None, None, None, None, False, True, reason) for group in groups
            )
        reason = chance_reason(self.columns, self.classes) if self.kind is not None else ""
        return compare_slices(config, groups, *values, better=self.metrics[config.metric].better, incomparable=reason)

    def _groups(self, classes: Sequence[str] | None) -> list[Group]:
        labels = {name.removeprefix(SLICE): self.columns[name] for name in self.columns if name.startswith(SLICE)}
        return list(slice_groups(labels, self.columns.get(ACTUAL), classes))

    def calibration(self, config: Evaluate) -> dict[str, Calibration]:
        """Return the calibration of candidate and baseline; empty if the task has no probabilities."""
        prefixes = {"candidate": CANDIDATE, "baseline": BASELINE}
        probabilities = {name: self.columns.get(prefix + PROBABILITIES) for name, prefix in prefixes.items()}
        actual = self.columns.get(ACTUAL)
        return {
            name: measure_calibration(config, rows, actual)
            for name, rows in probabilities.items()
            if rows is not None and actual is not None
        }

    def mcnemar(self, metric: str) -> McNemar | None:
        if self.baseline is None or metric not in self.candidate:
            return None
        return mcnemar(self.candidate[metric], self.baseline[metric])

    def _brier_gain(self, config: Evaluate) -> Interval | None:
        rows = [self.columns[owner + PROBABILITIES] for owner in (CANDIDATE, BASELINE)]
        return brier_gain(config, rows[0], rows[1], self.columns[ACTUAL])

    def _metrics(self, prefix: str) -> Columns:
        own_columns = {
            name.removeprefix(prefix): values for name, values in self.columns.items() if name.startswith(prefix)
        }
        return {name: values for name, values in own_columns.items() if name not in OUTPUTS}


def metrics_body(config: Evaluate, results: Results, test_fingerprint: str) -> dict[str, Any]:
    """Return the content of metrics.json; a value that is not finite is null, as JSON has no NaN."""
    metrics = results.metrics
    body: dict[str, Any] = {
        "samples": results.samples,
        "test_fingerprint": test_fingerprint,
        "candidate": _finite(metrics, metric_values(metrics, "candidate")),
        "baseline": None if results.kind is None else _finite(metrics, metric_values(metrics, "baseline")),
        "intervals": _intervals(config, results),
        "lower_is_better": [name for name, metric in metrics.items() if metric.lower],
        "undefined": {name: metric.why for name, metric in metrics.items() if metric.why},
        "classes": None,
        "per_class": None,
        "confusion": None,
    }
    if results.classes is not None:
        classes = [str(name) for name in results.classes]
        matrix: Array = confusion(results.columns[ACTUAL], results.columns[CANDIDATE + PREDICTED], len(classes))
        body |= {"classes": classes, "per_class": class_metrics(matrix, classes), "confusion": matrix.tolist()}
    return body | by_horizon(results.columns, results.kind is not None)


def verdict_body(
    config: Evaluate,
    results: Results,
    measurements: Measurements,
    verdict: Verdict,
    checkpoint: str,
    test_fingerprint: str,
) -> dict[str, Any]:
    """Return the content of verdict.json."""
    test, comparison = results.mcnemar(config.metric), measurements.comparison
    return {
        "verdict": verdict.verdict,
        "metric": config.metric,
        "rule": config.rule,
        "margin": config.applied_margin,
        "confidence": interval_level(config, measurements.count),
        "comparison": None if results.kind is None else _comparison_body(config, measurements.count),
        "samples": results.samples,
        "baseline": None if results.kind is None else {"kind": results.kind, "bundle": results.bundle},
        "difference": None if comparison is None else asdict(comparison.difference),
        "assumption": "" if comparison is None else comparison.assumption,
        "detectable": None if comparison is None or math.isinf(comparison.detectable) else comparison.detectable,
        "p_value": None if comparison is None else comparison.p_value,
        "mcnemar": None if test is None else asdict(test),
        "rules": [asdict(rule) for rule in verdict.rules],
        "slices": [asdict(slice_) for slice_ in measurements.slices],
        "calibration": _calibration_body(measurements),
        "warnings": list(verdict.warnings),
        "checkpoint": checkpoint,
        "test_fingerprint": test_fingerprint,
        "test_set": None if results.data is None else results.data.body(),
        "near_duplicates": _near_duplicates_body(measurements),
        "summary": verdict.summary,
    }


def _near_duplicates_body(measurements: Measurements) -> dict[str, Any] | None:
    """Return how many samples are copies, and the metrics without them."""
    if not measurements.near_duplicates:
        return None
    rest = measurements.without_copies
    sides = {} if rest is None else {"candidate": rest.candidate, "baseline": rest.baseline}
    values = {
        side: {name: finite_or_none(value) for name, value in metrics.items()}
        for side, metrics in sides.items()
        if metrics is not None
    }
    return {"samples": measurements.near_duplicates, "without": values}


def _comparison_body(config: Evaluate, count: ComparisonCount) -> dict[str, Any]:
    """Return which comparison on this test set it is, and what that makes of the configured level."""
    level, configured = confidence_text(interval_level(config, count)), confidence_text(config.confidence)
    text = f"comparison {count.number} on this test set, interval at {level}"
    if count.number > 1:
        text += f"{', not widened' if level == configured else f' instead of {configured}'}: evaluate.widen is "
        text += config.widen + f", authors: {count.authors}" * (config.widen == "shared")
    return {"number": count.number, "authors": count.authors, "level": level, "text": text}


def _calibration_body(measurements: Measurements) -> dict[str, Any] | None:
    if measurements.calibration is None:
        return None
    baseline = measurements.baseline_calibration
    return {"candidate": measurements.calibration.body(), "baseline": None if baseline is None else baseline.body()}


def _intervals(config: Evaluate, results: Results) -> dict[str, Any]:
    """Return the intervals of every metric and of its difference, where positive is better."""
    metrics, level = results.metrics, config.confidence
    body: dict[str, Any] = {"confidence": level}
    body["candidate"] = {name: interval_bounds(metric.interval("candidate", level)) for name, metric in metrics.items()}
    if results.kind is not None:
        body["baseline"] = {
            name: interval_bounds(metric.interval("baseline", level)) for name, metric in metrics.items()
        }
        differences = {name: metric.difference(level) for name, metric in metrics.items()}
        body["difference"] = {
            name: None if difference is None else asdict(difference) for name, difference in differences.items()
        }
    return body


def _finite(metrics: Mapping[str, Metric], values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: finite_or_none(values.get(name, math.nan)) for name in metrics}


Body = Mapping[str, Any]


def explain(verdict: Body, override: Body | None) -> dict[str, Any]:
    """Return what `pipe gate explain -o json` prints; keys that an older run does not have are absent or None."""
    return {
        "verdict": verdict["verdict"],
        "summary": verdict["summary"],
        "override": override,
        "comparison": verdict.get("comparison"),
        "rules": [dict(rule) for rule in verdict["rules"]],
        "power": _power(verdict),
        "tests": {"permutation_p": verdict.get("p_value"), "mcnemar": verdict.get("mcnemar")},
        "slices": verdict.get("slices") or [],
        "warnings": list(verdict.get("warnings") or ()),
    }


def describe_verdict(explanation: Body) -> Iterator[str]:
    yield f"{explanation['verdict']}: {explanation['summary']}"
    if override := explanation["override"]:
        yield f"overridden by {override['by']}, {override['at']}: {override['reason']}"
    if comparison := explanation.get("comparison"):
        yield comparison["text"]
    for rule in explanation["rules"]:
        yield ""
        yield f"{'passed' if rule['passed'] else 'FAILED'}  {rule['rule']}: {rule['detail']}"
        if rule.get("how"):
            yield f"        how: {rule['how']}"
        if rule.get("change"):
            yield f"        what would change it: {rule['change']}"
    yield from _slice_lines(explanation["slices"])
    yield ""
    yield from _significance_lines(explanation)
    yield from (f"warning: {warning}" for warning in explanation["warnings"])
    if not passed_gate(explanation["verdict"]) and not override:
        yield f"to let it pass anyway: `pipe gate override {explanation.get('run', 'RUN')} --reason WHY`"


def _power(verdict: Body) -> dict[str, Any] | None:
    """Return the difference that the test set can show, and the number of samples needed for the margin."""
    detectable, samples, margin = verdict.get("detectable"), verdict["samples"], verdict["margin"]
    if detectable is None:
        return None
    samples_for_margin = samples_needed(samples, detectable, margin)
    return {"samples": samples, "detectable": detectable, "margin": margin, "samples_for_margin": samples_for_margin}


def _slice_lines(slices: list[Body]) -> Iterator[str]:
    if slices:
        yield ""
        yield "slices:"
    for slice_ in slices:
        state = ("passed" if slice_["passed"] else "FAILED") if slice_["judged"] else "shown "
        yield f"  {state}  {slice_['slice']} ({slice_['samples']} samples): {slice_['detail']}"


def _significance_lines(explanation: Body) -> Iterator[str]:
    power, tests = explanation["power"], explanation["tests"]
    if power is None:
        yield "power: unknown, there is no baseline or the test set is too small"
    else:
        sample_count = power["samples_for_margin"]
        advice = f"; a margin of {power['margin']:g} needs about {sample_count}"
        if sample_count is None:
            advice = "; no number of samples can show a margin of 0"
        if not any(rule["rule"] == "non-inferior" and rule.get("inconclusive") for rule in explanation["rules"]):
            advice = ""  # decided, or it depends on how much better the candidate is
        yield (
            f"power: a true difference of {digits(power['detectable'])} or more shows in four of five test sets of "
            f"{power['samples']} samples{advice}"
        )
    if tests["permutation_p"] is not None:
        yield f"permutation test: p = {tests['permutation_p']:.4g} for the hypothesis that both models are equally good"
    if tests["mcnemar"]:
        test = tests["mcnemar"]
        yield (
            f"McNemar's exact test: p = {test['p_value']:.4g}; {test['only_candidate']} samples only the candidate "
            f"gets right, {test['only_baseline']} only the baseline"
        )


_LEVEL = 0.025  # one-sided, at which a baseline counts as better than chance
_MIN_WRONG = 3  # samples of a slice that are all wrong


def chance_reason(columns: Columns, classes: Sequence[str] | None) -> str:
    """Return why the baseline's answers are no better than chance; empty if they are better or it is not known."""
    predicted, actual = columns.get(BASELINE + PREDICTED), columns.get(ACTUAL)
    if predicted is None or actual is None or QUERY in columns:
        return ""
    if (predicted == predicted[0]).all() and predicted.ndim > 1:
        return "the baseline predicts the same for every sample"
    if (predicted == predicted[0]).all():
        constant = predicted[0] if classes is None else classes[int(predicted[0])]
        return f"the baseline always predicts {constant if classes is not None else f'{constant:.4g}'}"
    if classes is None:
        return ""
    shares = [np.bincount(values, minlength=len(classes)) / len(actual) for values in (predicted, actual)]
    hits, by_chance = int((predicted == actual).sum()), float(shares[0] @ shares[1])
    if float(scipy.special.bdtrc(hits - 1, len(actual), by_chance)) < _LEVEL:
        return ""
    return f"the baseline is right in {hits} of {len(actual)} samples, no more often than by chance"


def find_doubts(
    config: Evaluate,
    columns: Columns,
    classes: Sequence[str] | None,
    metrics: Mapping[str, Metric],
    slices: Sequence[Slice],
    compared: bool,
) -> Iterator[str]:
    """Yield a clause for each reason to distrust a candidate that passes."""
    if not compared and not config.require:
        yield "nothing is required: there is no baseline and no evaluate.require"
    predicted, actual = columns.get(CANDIDATE + PREDICTED), columns.get(ACTUAL)
    is_perfect = predicted is not None and actual is not None and bool((predicted == actual).all())
    decisive = metrics[config.metric].candidate
    if isinstance(decisive, Mean) and not is_perfect and _is_constant(decisive.column):
        yield f"{config.metric} is {decisive.column[0]:.4g} for every sample; check metrics()"
    if classes is not None and predicted is not None and actual is not None:
        yield from _dead_classes(predicted, actual, classes)
    wrong = [
        slice_.slice
        for slice_ in slices
        if _MIN_WRONG <= slice_.samples < MIN_SLICE_SAMPLES and slice_.candidate == 0.0 and _is_share(decisive)
    ]
    if wrong:
        yield f"every sample is wrong in {join_names(wrong, MAX_NAMES)}, which is too small to be judged"


def find_weak_slices(columns: Columns, classes: Sequence[str] | None, groups: Sequence[Group]) -> str:
    """Return in which slices both models are right no more often than one answer would be; empty if in none.

    A slice with a single class does not count, because no answer is better there.
    """
    actual, weak = columns.get(ACTUAL), []
    if classes is None or actual is None or BASELINE + PREDICTED not in columns:
        return ""
    right = [columns[owner + PREDICTED] == actual for owner in (CANDIDATE, BASELINE)]
    for group in groups:
        counts = np.bincount(actual[group.members], minlength=len(classes))
        most_hits = max(int(each[group.members].sum()) for each in right)
        if MIN_SLICE_SAMPLES <= len(group.members) > counts.max() >= most_hits:
            weak.append(f"`{classes[int(counts.argmax())]}` in {group.name} ({len(group.members)} samples)")
    return f"neither model is better than always answering {join_names(weak, MAX_NAMES)}" if weak else ""


def _dead_classes(predicted: Array, actual: Array, classes: Sequence[str]) -> Iterator[str]:
    occurring = np.bincount(actual, minlength=len(classes))
    answered = np.bincount(predicted, minlength=len(classes))
    dead = [str(name) for name, true, found in zip(classes, occurring, answered, strict=True) if true and not found]
    if dead:
        yield f"never predicted: {join_names(dead, MAX_NAMES)}"


def _is_constant(values: Array) -> bool:
    return len(values) > 1 and math.isfinite(float(values[0])) and bool((values == values[0]).all())


def _is_share(statistic: object) -> bool:
    """Return True for a metric of right and wrong answers, where 0 means that all are wrong."""
    return isinstance(statistic, Mean) and bool(np.isin(statistic.column, (0.0, 1.0)).all())
