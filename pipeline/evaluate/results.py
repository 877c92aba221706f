"""What was measured on the whole test split, and what it says in the words of the step's files; pure.

A verdict in sentences: every rule with its numbers, and what the test set could show at all; pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

from pipeline.contract.errors import ConfigError, DataError
from pipeline.contract.settings.stages import Evaluate
from pipeline.contract.statistics.bootstrap import Interval
from pipeline.contract.statistics.significance import McNemar, mcnemar, permutation_p_value, smallest_difference
from pipeline.evaluate.calibration import Calibration, brier_gain, calibration_of
from pipeline.evaluate.gate import Judged, Verdict
from pipeline.evaluate.metrics import Measure, confusion, measures, per_class, values_of
from pipeline.evaluate.predictions import ACTUAL, BASELINE, CANDIDATE, PREDICTED, PROBABILITIES, SLICE, Array, Columns
from pipeline.evaluate.rules import Comparison, samples_needed
from pipeline.evaluate.slices import Slice, groups, judge_slices

_RESAMPLES_TOLD = 1000  # of intervals that decide nothing


@dataclass(frozen=True)
class Evidence:
    columns: Columns  # as predictions.npz holds them
    kind: Literal["champion", "task"] | None  # of the baseline, when there is one
    bundle: str | None  # digest of the champion's bundle
    classes: Sequence[str] | None

    @cached_property
    def candidate(self) -> Columns:
        """The task's own metrics, one value per sample."""
        return self._metrics(CANDIDATE)

    @cached_property
    def baseline(self) -> Columns | None:
        return self._metrics(BASELINE) if self.kind else None

    @cached_property
    def measures(self) -> dict[str, Measure]:
        return measures(self.columns, self.classes, self.kind is not None)

    @property
    def samples(self) -> int:
        return len(next(iter(self.columns.values())))

    def check(self, config: Evaluate) -> None:
        """The compared metric exists, and candidate and baseline were measured alike."""
        if self.baseline is not None and (differing := sorted(self.candidate.keys() ^ self.baseline.keys())):
            raise DataError(f"metrics(): {', '.join(differing)} is returned for only one of candidate and baseline")
        if config.metric not in self.measures:
            known = ", ".join(self.measures)
            raise ConfigError(f"evaluate.metric: the task has no metric {config.metric} (it has {known})")
        if config.calibration and CANDIDATE + PROBABILITIES not in self.columns:
            raise ConfigError("evaluate.calibration: needs a classifier whose task has probabilities(outputs)")

    def judged(self, config: Evaluate) -> Judged:
        """All that the rules look at."""
        found = self.measures
        baseline = None if self.kind is None else values_of(found, "baseline")
        calibration = self.calibration(config)
        return Judged(
            samples=self.samples,
            candidate=values_of(found, "candidate"),
            baseline=baseline,
            lower=frozenset(name for name, one in found.items() if one.lower),
            undefined={name: one.why for name, one in found.items() if one.why},
            notes=tuple(one.note for one in found.values() if one.note),
            comparison=self.comparison(config),
            slices=self.slices(config),
            calibration=calibration.get("candidate"),
            baseline_calibration=calibration.get("baseline"),
            brier_gain=self._brier_gain(config) if "baseline" in calibration else None,
        )

    def comparison(self, config: Evaluate) -> Comparison | None:
        """None without a baseline, or where a value is not finite or undefined: the gate then says so."""
        measure = self.measures[config.metric]
        if self.kind is None or measure.candidate is None:
            return None
        difference = measure.difference(config.confidence, config.resamples, config.seed)
        if difference is None:
            return None
        values = measure.contributions()
        return Comparison(
            samples=len(values),
            difference=difference,
            detectable=smallest_difference(values, config.confidence),
            p_value=permutation_p_value(values, config.resamples, config.seed),
            unit=measure.unit,
        )

    @cached_property
    def labels(self) -> Columns:
        return {name.removeprefix(SLICE): self.columns[name] for name in self.columns if name.startswith(SLICE)}

    def slices(self, config: Evaluate) -> tuple[Slice, ...]:
        """By the metric that decides; one that has no value per sample cannot be looked at slice by slice."""
        found = list(groups(self.labels, self.columns.get(ACTUAL), self.classes))
        values = self.measures[config.metric].slices
        if values is None:
            why = f"{config.metric} has no value of its own for each sample; not judged"
            return tuple(Slice(one.name, len(one.members), None, None, None, None, False, True, why) for one in found)
        return judge_slices(config, found, *values)

    def calibration(self, config: Evaluate) -> dict[str, Calibration]:
        """By owner; empty where the task states no probabilities."""
        owners = {"candidate": CANDIDATE, "baseline": BASELINE}
        stated = {who: self.columns.get(owner + PROBABILITIES) for who, owner in owners.items()}
        # Its intervals tell; the rule about the baseline has one of its own.
        told = config.model_copy(update={"resamples": min(config.resamples, _RESAMPLES_TOLD)})
        actual = self.columns.get(ACTUAL)
        return {
            who: calibration_of(told, rows, actual)
            for who, rows in stated.items()
            if rows is not None and actual is not None
        }

    def mcnemar(self, metric: str) -> McNemar | None:
        if self.baseline is None or metric not in self.candidate:
            return None
        return mcnemar(self.candidate[metric], self.baseline[metric])

    def _brier_gain(self, config: Evaluate) -> Interval:
        rows = [self.columns[owner + PROBABILITIES] for owner in (CANDIDATE, BASELINE)]
        return brier_gain(config, rows[0], rows[1], self.columns[ACTUAL])

    def _metrics(self, owner: str) -> Columns:
        named = {name.removeprefix(owner): values for name, values in self.columns.items() if name.startswith(owner)}
        return {name: values for name, values in named.items() if name not in (PREDICTED, PROBABILITIES)}


def metrics_body(config: Evaluate, evidence: Evidence, test_fingerprint: str) -> dict[str, Any]:
    """metrics.json; a value that is not finite is null, JSON has no other word for it."""
    found = evidence.measures
    body: dict[str, Any] = {
        "samples": evidence.samples,
        "test_fingerprint": test_fingerprint,
        "candidate": _finite(found, values_of(found, "candidate")),
        "baseline": None if evidence.kind is None else _finite(found, values_of(found, "baseline")),
        "intervals": _intervals(config, evidence),
        "lower_is_better": [name for name, one in found.items() if one.lower],
        "undefined": {name: one.why for name, one in found.items() if one.why},
        "classes": None,
        "per_class": None,
        "confusion": None,
    }
    if evidence.classes is not None:
        classes = [str(name) for name in evidence.classes]
        matrix: Array = confusion(evidence.columns[ACTUAL], evidence.columns[CANDIDATE + PREDICTED], len(classes))
        body |= {"classes": classes, "per_class": per_class(matrix, classes), "confusion": matrix.tolist()}
    return body


def verdict_body(
    config: Evaluate, evidence: Evidence, judged: Judged, verdict: Verdict, checkpoint: str, test_fingerprint: str
) -> dict[str, Any]:
    """verdict.json"""
    test, comparison = evidence.mcnemar(config.metric), judged.comparison
    return {
        "verdict": verdict.verdict,
        "metric": config.metric,
        "rule": config.rule,
        "margin": config.margin,
        "confidence": config.confidence,
        "samples": evidence.samples,
        "baseline": None if evidence.kind is None else {"kind": evidence.kind, "bundle": evidence.bundle},
        "difference": None if comparison is None else asdict(comparison.difference),
        "detectable": None if comparison is None or math.isinf(comparison.detectable) else comparison.detectable,
        "p_value": None if comparison is None else comparison.p_value,
        "mcnemar": None if test is None else asdict(test),
        "rules": [asdict(rule) for rule in verdict.rules],
        "slices": [asdict(one) for one in judged.slices],
        "calibration": _calibration_body(judged),
        "warnings": list(verdict.warnings),
        "checkpoint": checkpoint,
        "test_fingerprint": test_fingerprint,
        "summary": verdict.summary,
    }


def _calibration_body(judged: Judged) -> dict[str, Any] | None:
    if judged.calibration is None:
        return None
    other = judged.baseline_calibration
    return {"candidate": judged.calibration.body(), "baseline": None if other is None else other.body()}


def _intervals(config: Evaluate, evidence: Evidence) -> dict[str, Any]:
    """Of every metric and of its difference, where positive is better."""
    found, resamples = evidence.measures, min(config.resamples, _RESAMPLES_TOLD)
    level = config.confidence

    def bounds(interval: Interval | None) -> list[float] | None:
        return None if interval is None else [interval.low, interval.high]

    body: dict[str, Any] = {"confidence": level, "resamples": resamples}
    body["candidate"] = {name: bounds(one.interval("candidate", level, resamples)) for name, one in found.items()}
    if evidence.kind is not None:
        body["baseline"] = {name: bounds(one.interval("baseline", level, resamples)) for name, one in found.items()}
        differences = {name: one.difference(level, resamples, config.seed) for name, one in found.items()}
        body["difference"] = {name: None if one is None else asdict(one) for name, one in differences.items()}
    return body


def _finite(found: Mapping[str, Measure], values: Mapping[str, float]) -> dict[str, float | None]:
    known = {name: values.get(name, math.nan) for name in found}
    return {name: value if math.isfinite(value) else None for name, value in known.items()}


Body = Mapping[str, Any]


def explain(verdict: Body, override: Body | None) -> dict[str, Any]:
    """What `-o json` prints; keys that an older run does not have are absent or None."""
    return {
        "verdict": verdict["verdict"],
        "summary": verdict["summary"],
        "override": override,
        "rules": [dict(rule) for rule in verdict["rules"]],
        "power": _power(verdict),
        "tests": {"permutation_p": verdict.get("p_value"), "mcnemar": verdict.get("mcnemar")},
        "slices": verdict.get("slices") or [],
        "warnings": list(verdict.get("warnings") or ()),
    }


def sentences(found: Body) -> Iterator[str]:
    yield f"{found['verdict']}: {found['summary']}"
    if found["override"]:
        yield f"overridden by {found['override']['by']}, {found['override']['at']}: {found['override']['reason']}"
    for rule in found["rules"]:
        yield ""
        yield f"{'passed' if rule['passed'] else 'FAILED'}  {rule['rule']}: {rule['detail']}"
        if rule.get("how"):
            yield f"        how: {rule['how']}"
        if rule.get("change"):
            yield f"        what would change it: {rule['change']}"
    yield from _slice_lines(found["slices"])
    yield ""
    yield from _test_lines(found)
    yield from (f"warning: {warning}" for warning in found["warnings"])


def _power(verdict: Body) -> dict[str, Any] | None:
    """What differences so many samples show, and how many it would take for the margin."""
    detectable, samples, margin = verdict.get("detectable"), verdict["samples"], verdict["margin"]
    if detectable is None:
        return None
    needed = samples_needed(samples, detectable, margin)
    return {"samples": samples, "detectable": detectable, "margin": margin, "samples_for_margin": needed}


def _slice_lines(slices: list[Body]) -> Iterator[str]:
    if slices:
        yield ""
        yield "slices:"
    for one in slices:
        state = ("passed" if one["passed"] else "FAILED") if one["judged"] else "told  "
        yield f"  {state}  {one['slice']} ({one['samples']} samples): {one['detail']}"


def _test_lines(found: Body) -> Iterator[str]:
    power, tests = found["power"], found["tests"]
    if power is None:
        yield "power: unknown, there is nothing to compare with or too little of it"
    else:
        enough = power["samples_for_margin"]
        told = "no number of samples shows a margin of 0" if enough is None else f"a margin of {power['margin']:g} takes about {enough}"  # fmt: skip  # noqa: E501
        yield (
            f"power: {power['samples']} samples show a true difference of {power['detectable']:.4g} in four of five "
            f"such test sets; {told}"
        )
    if tests["permutation_p"] is not None:
        yield f"permutation test: p = {tests['permutation_p']:.4g} that which model gave which answer is a toss-up"
    if tests["mcnemar"]:
        one = tests["mcnemar"]
        yield (
            f"McNemar's exact test: p = {one['p_value']:.4g}; {one['only_candidate']} samples only the candidate gets "
            f"right, {one['only_baseline']} only the baseline"
        )
