"""Calibration of a classifier: reliability curve, ECE and Brier score with intervals, and the rules about them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.contract.settings.stages import Evaluate
from pipeline.evaluate.rules import GateRule, decide_inconclusive, digits, position
from pipeline.statistics.aggregates import CalibrationError, Mean
from pipeline.statistics.intervals import Interval, difference_interval, metric_interval
from pipeline.statistics.metrics import BRIER_RANGE
from pipeline.statistics.scores import Array
from pipeline.statistics.significance import (
    Bin,
    brier_scores,
    calibration_curve,
    confidences_and_hits,
    expected_calibration_error,
)


@dataclass(frozen=True)
class Calibration:
    ece: float
    ece_interval: Interval | None  # None for a single sample
    brier: float
    brier_interval: Interval | None
    bins: tuple[Bin, ...]

    def body(self) -> dict[str, Any]:
        return {
            "ece": self.ece,
            "brier": self.brier,
            "intervals": {"ece": interval_bounds(self.ece_interval), "brier": interval_bounds(self.brier_interval)},
            "bins": [
                {
                    "low": bin_.low,
                    "high": bin_.high,
                    "count": bin_.samples,
                    "confidence": bin_.confidence,
                    "accuracy": bin_.accuracy,
                }
                for bin_ in self.bins
            ],
        }


def measure_calibration(config: Evaluate, probabilities: Array, actual: Array) -> Calibration:
    confidences, hits = confidences_and_hits(probabilities, actual)
    scores = brier_scores(probabilities.astype(np.float64), actual)
    bins = calibration_curve(confidences, hits)
    ece = metric_interval(CalibrationError(confidences, hits), config.confidence)
    brier = metric_interval(Mean(scores, BRIER_RANGE), config.confidence)
    return Calibration(expected_calibration_error(bins), ece, float(scores.mean()), brier, bins)


def interval_bounds(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [interval.low, interval.high]


def brier_gain(config: Evaluate, candidate: Array, baseline: Array, actual: Array) -> Interval | None:
    """Return how much lower the candidate's Brier score is on the same samples; positive is better."""
    scores = [Mean(brier_scores(rows.astype(np.float64), actual), BRIER_RANGE) for rows in (baseline, candidate)]
    return difference_interval(scores[0], scores[1], config.confidence)


def calibration_rules(config: Evaluate, candidate: Calibration, gain: Interval | None) -> Iterator[GateRule]:
    if (limit := config.calibration_limits.get("ece")) is not None:
        yield _limit_rule(config, "ece", candidate.ece, candidate.ece_interval, limit)
    if (limit := config.calibration_limits.get("brier")) is not None:
        yield _limit_rule(config, "brier", candidate.brier, candidate.brier_interval, limit)
    margin = config.calibration_limits.get("brier_margin")
    if margin is not None and gain is not None:
        yield _margin_rule(config, gain, margin)


def _limit_rule(config: Evaluate, name: str, value: float, interval: Interval | None, limit: float) -> GateRule:
    rule = f"calibration.{name}"
    how = (
        f"{_LONG_NAMES[name]} of the candidate over the whole test set, at most {limit:g}; with its "
        f"{config.confidence:.0%} interval"
    )
    bounds = (
        f" ({config.confidence:.0%} interval {digits(interval.low)} to {digits(interval.high)})" if interval else ""
    )
    if value > limit:
        text = f"{name} {digits(value)}{bounds} is {value - limit:.4g} above the {limit:g} allowed"
        change = f"a limit of {digits(value)} or more would have passed it; temperature scaling of the logits may help"
        return GateRule(rule, False, text, value, limit, how, change)
    text = f"{name} {digits(value)}{bounds} is within the {limit:g} allowed"
    return GateRule(rule, True, text, value, limit, how, f"a limit below {digits(value)} would have stopped it")


def _margin_rule(config: Evaluate, gain: Interval, margin: float) -> GateRule:
    how = (
        f"the baseline's Brier score less the candidate's on the same samples, {config.confidence:.0%} interval; "
        f"its lower end must be above -{margin:g}"
    )
    is_passed = gain.low > -margin
    values = f"{position(gain.estimate, 'baseline')} and may be {position(gain.low)}"
    text = f"the Brier score is {values}; {margin:g} worse is allowed"
    change = f"a margin above {digits(-gain.low)} would have passed it"
    if is_passed:
        change = (
            f"a margin of {digits(-gain.low)} or less would have stopped it"
            if gain.low <= 0
            else "no margin would have stopped it"
        )
    rule = GateRule("calibration.brier_margin", is_passed, text, gain.low, -margin, how, change)
    return rule if is_passed or gain.high <= -margin else decide_inconclusive(config, rule)


_LONG_NAMES = {"ece": "expected calibration error (15 bins)", "brier": "Brier score (0 is perfect, 2 the worst)"}
