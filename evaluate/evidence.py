"""What was measured on the whole test split, and what it says in the words of the step's files; pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

from evaluate.classes import confusion, per_class
from evaluate.gate import Verdict
from evaluate.prediction import PREDICTED, Array, Columns
from evaluate.statistics import Interval, McNemar, bootstrap_interval, mcnemar
from pipeline.spec.errors import ConfigError, DataError
from pipeline.spec.sections import Evaluate

CANDIDATE, BASELINE, ACTUAL = "candidate.", "baseline.", "actual"


@dataclass(frozen=True)
class Evidence:
    columns: Columns  # as predictions.npz holds them
    kind: Literal["champion", "task"] | None  # of the baseline, when there is one
    bundle: str | None  # digest of the champion's bundle
    classes: Sequence[str] | None

    @cached_property
    def candidate(self) -> Columns:
        return self._metrics(CANDIDATE)

    @cached_property
    def baseline(self) -> Columns | None:
        return self._metrics(BASELINE) if self.kind else None

    @property
    def samples(self) -> int:
        return len(next(iter(self.columns.values())))

    def check(self, metric: str) -> None:
        """The compared metric exists, and candidate and baseline were measured alike."""
        if metric not in self.candidate:
            raise ConfigError(f"evaluate.metric: the task has no metric {metric} (it has {', '.join(self.candidate)})")
        if self.baseline is not None and (differing := sorted(self.candidate.keys() ^ self.baseline.keys())):
            raise DataError(f"metrics(): {', '.join(differing)} is returned for only one of candidate and baseline")

    def difference(self, config: Evaluate) -> Interval | None:
        """None without a baseline, or where a value is not finite: the gate then says so."""
        if self.baseline is None:
            return None
        values = self.candidate[config.metric] - self.baseline[config.metric]
        if not math.isfinite(values.sum()):
            return None
        return bootstrap_interval(values, config.confidence, config.resamples, config.seed)

    def mcnemar(self, metric: str) -> McNemar | None:
        return None if self.baseline is None else mcnemar(self.candidate[metric], self.baseline[metric])

    def _metrics(self, owner: str) -> Columns:
        named = {name.removeprefix(owner): values for name, values in self.columns.items() if name.startswith(owner)}
        return {name: values for name, values in named.items() if self.classes is None or name != PREDICTED}


def means(columns: Columns) -> dict[str, float]:
    return {name: float(values.mean()) for name, values in columns.items()}


def metrics_body(evidence: Evidence, test_fingerprint: str) -> dict[str, Any]:
    """metrics.json; a value that is not finite is null, JSON has no other word for it."""
    body: dict[str, Any] = {
        "samples": evidence.samples,
        "test_fingerprint": test_fingerprint,
        "candidate": _finite(means(evidence.candidate)),
        "baseline": None if evidence.baseline is None else _finite(means(evidence.baseline)),
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
    config: Evaluate, evidence: Evidence, difference: Interval | None, verdict: Verdict, checkpoint: str
) -> dict[str, Any]:
    """verdict.json"""
    test = evidence.mcnemar(config.metric)
    return {
        "verdict": verdict.verdict,
        "forced_reason": config.force_reason if verdict.verdict == "forced" else "",
        "metric": config.metric,
        "margin": config.margin,
        "confidence": config.confidence,
        "samples": evidence.samples,
        "baseline": None if evidence.kind is None else {"kind": evidence.kind, "bundle": evidence.bundle},
        "difference": None if difference is None else asdict(difference),
        "mcnemar": None if test is None else asdict(test),
        "rules": [asdict(rule) for rule in verdict.rules],
        "checkpoint": checkpoint,
        "summary": verdict.summary,
    }


def _finite(values: dict[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
