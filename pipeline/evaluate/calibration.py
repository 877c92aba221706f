"""Calibration of a classifier: reliability curve, ECE and Brier score with intervals, and the rules about them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.contract.settings.stages import Evaluate
from pipeline.contract.statistics.bootstrap import (
    BOOTSTRAP_SEED,
    CalibrationError,
    Floats,
    Interval,
    aggregate_interval,
    mean_interval,
)
from pipeline.contract.statistics.scores import Array
from pipeline.contract.statistics.significance import Bin, brier_scores, calibration_curve, expected_calibration_error
from pipeline.evaluate.rules import GateRule


@dataclass(frozen=True)
class Calibration:
    ece: float
    ece_interval: Interval | None  # None for a single sample
    brier: Interval
    bins: tuple[Bin, ...]

    def body(self) -> dict[str, Any]:
        return {
            "ece": self.ece,
            "brier": self.brier.estimate,
            "intervals": {
                "ece": None if self.ece_interval is None else [self.ece_interval.low, self.ece_interval.high],
                "brier": [self.brier.low, self.brier.high],
            },
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
    confidences, hits = _confidences_and_hits(probabilities, actual)
    scores = brier_scores(probabilities.astype(np.float64), actual)
    bins = calibration_curve(confidences, hits)
    ece = aggregate_interval(
        CalibrationError(confidences, hits), None, config.confidence, config.resamples, BOOTSTRAP_SEED
    )
    brier = mean_interval(scores, config.confidence, config.resamples, BOOTSTRAP_SEED)
    return Calibration(expected_calibration_error(bins), ece, brier, bins)


def brier_gain(config: Evaluate, candidate: Array, baseline: Array, actual: Array) -> Interval:
    """Return how much lower the candidate's Brier score is on the same samples; positive is better."""
    values = brier_scores(baseline.astype(np.float64), actual) - brier_scores(candidate.astype(np.float64), actual)
    return mean_interval(values, config.confidence, config.resamples, BOOTSTRAP_SEED)


def calibration_rules(config: Evaluate, candidate: Calibration, gain: Interval | None) -> Iterator[GateRule]:
    if (limit := config.calibration_limits.get("ece")) is not None:
        yield _limit_rule(config, "ece", candidate.ece, candidate.ece_interval, limit)
    if (limit := config.calibration_limits.get("brier")) is not None:
        yield _limit_rule(config, "brier", candidate.brier.estimate, candidate.brier, limit)
    margin = config.calibration_limits.get("brier_margin")
    if margin is not None and gain is not None:
        yield _margin_rule(config, gain, margin)


def _limit_rule(config: Evaluate, name: str, value: float, interval: Interval | None, limit: float) -> GateRule:
    rule = f"calibration.{name}"
    how = (
        f"{_LONG_NAMES[name]} of the candidate over the whole test set, at most {limit:g}; with its "
        f"{config.confidence:.0%} bootstrap interval"
    )
    bounds = f" ({config.confidence:.0%} interval {interval.low:.4f} to {interval.high:.4f})" if interval else ""
    if value > limit:
        text = f"{name} {value:.4f}{bounds} is {value - limit:.4g} above the {limit:g} allowed"
        change = f"a limit of {value:.4f} or more would have passed it; temperature scaling of the logits may help"
        return GateRule(rule, False, text, value, limit, how, change)
    text = f"{name} {value:.4f}{bounds} is within the {limit:g} allowed"
    return GateRule(rule, True, text, value, limit, how, f"a limit below {value:.4f} would have stopped it")


def _margin_rule(config: Evaluate, gain: Interval, margin: float) -> GateRule:
    how = (
        f"the baseline's Brier score less the candidate's on the same samples, {config.confidence:.0%} BCa interval; "
        f"its lower bound must lie above -{margin:g}"
    )
    is_passed = gain.low > -margin or gain == Interval(0.0, 0.0, 0.0)
    text = f"the Brier score is better by {gain.estimate:+.4f} than the baseline's, at least {gain.low:+.4f}"
    change = f"a margin above {-gain.low:.4f} would have passed it"
    if is_passed:
        change = (
            f"a margin of {-gain.low:.4f} or less would have stopped it"
            if gain.low <= 0
            else "no margin would have stopped it"
        )
    return GateRule("calibration.brier_margin", is_passed, text, gain.low, -margin, how, change)


def _confidences_and_hits(probabilities: Array, actual: Array) -> tuple[Floats, Floats]:
    """Return the probability of the likeliest class, and 1 where that class is the true one."""
    wide = probabilities.astype(np.float64)
    return np.minimum(wide.max(axis=1), 1.0), (wide.argmax(axis=1) == actual).astype(np.float64)


_LONG_NAMES = {"ece": "expected calibration error (15 bins)", "brier": "Brier score (0 is perfect, 2 the worst)"}
