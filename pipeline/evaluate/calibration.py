"""Whether a classifier's probabilities are true: its curve, its errors with intervals, and the rules about them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.contract.settings.stages import Evaluate
from pipeline.contract.statistics.bootstrap import CalibrationError, Floats, Interval, aggregate_interval, mean_interval
from pipeline.contract.statistics.significance import Bin, brier, curve, expected_error
from pipeline.evaluate.predictions import Array
from pipeline.evaluate.rules import Rule


@dataclass(frozen=True)
class Calibration:
    """Of one model."""

    ece: float
    ece_interval: Interval | None  # none on a single sample
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
                    "low": one.low,
                    "high": one.high,
                    "count": one.samples,
                    "confidence": one.confidence,
                    "accuracy": one.accuracy,
                }
                for one in self.bins
            ],
        }


def calibration_of(config: Evaluate, probabilities: Array, actual: Array) -> Calibration:
    stated, right = _stated(probabilities, actual)
    scores = brier(probabilities.astype(np.float64), actual)
    bins = curve(stated, right)
    error = aggregate_interval(CalibrationError(stated, right), None, config.confidence, config.resamples, config.seed)
    told = mean_interval(scores, config.confidence, config.resamples, config.seed)
    return Calibration(expected_error(bins), error, told, bins)


def brier_gain(config: Evaluate, candidate: Array, baseline: Array, actual: Array) -> Interval:
    """By how much the candidate's Brier score is lower, on the same samples; positive is better."""
    values = brier(baseline.astype(np.float64), actual) - brier(candidate.astype(np.float64), actual)
    return mean_interval(values, config.confidence, config.resamples, config.seed)


def calibration_rules(config: Evaluate, candidate: Calibration, gain: Interval | None) -> Iterator[Rule]:
    if (ceiling := config.calibration.get("ece")) is not None:
        yield _ceiling(config, "ece", candidate.ece, candidate.ece_interval, ceiling)
    if (ceiling := config.calibration.get("brier")) is not None:
        yield _ceiling(config, "brier", candidate.brier.estimate, candidate.brier, ceiling)
    margin = config.calibration.get("brier_margin")
    if margin is not None and gain is not None:
        yield _not_worse(config, gain, margin)


def _ceiling(config: Evaluate, name: str, value: float, found: Interval | None, ceiling: float) -> Rule:
    rule = f"calibration.{name}"
    how = (
        f"{_WORDS[name]} of the candidate over the whole test set, at most {ceiling:g}; its {config.confidence:.0%} "
        "interval by the bootstrap"
    )
    interval = f" ({config.confidence:.0%} interval {found.low:.4f} to {found.high:.4f})" if found else ""
    if value > ceiling:
        text = f"{name} {value:.4f}{interval} is {value - ceiling:.4g} above the {ceiling:g} allowed"
        change = f"a ceiling of {value:.4f} or more would have passed it; dividing the logits by a constant may help"
        return Rule(rule, False, text, value, ceiling, how, change)
    text = f"{name} {value:.4f}{interval} is within the {ceiling:g} allowed"
    return Rule(rule, True, text, value, ceiling, how, f"a ceiling below {value:.4f} would have stopped it")


def _not_worse(config: Evaluate, gain: Interval, margin: float) -> Rule:
    how = (
        f"the baseline's Brier score less the candidate's on the same samples, {config.confidence:.0%} BCa interval; "
        f"its lower bound must lie above -{margin:g}"
    )
    passed = gain.low > -margin or gain == Interval(0.0, 0.0, 0.0)
    text = f"the Brier score is better by {gain.estimate:+.4f} than the baseline's, at least {gain.low:+.4f}"
    change = f"a margin above {-gain.low:.4f} would have passed it"
    if passed:
        change = (
            f"a margin of {-gain.low:.4f} or less would have stopped it"
            if gain.low <= 0
            else "no margin would have stopped it"
        )
    return Rule("calibration.brier_margin", passed, text, gain.low, -margin, how, change)


def _stated(probabilities: Array, actual: Array) -> tuple[Floats, Floats]:
    """How sure the model says it is of its likeliest class, and whether that is the true one."""
    wide = probabilities.astype(np.float64)
    return np.minimum(wide.max(axis=1), 1.0), (wide.argmax(axis=1) == actual).astype(np.float64)


_WORDS = {"ece": "expected calibration error (15 bins)", "brier": "Brier score (0 is perfect, 2 the worst)"}
