"""Coverage of the gate's intervals and its false passes, in simulated test sets: `python -m benchmarks.coverage`.

Two models with a known true difference are drawn again and again: with how many test sets does the interval contain the
difference, and how often does the gate pass a candidate that is worse by exactly the margin? Accuracy is not drawn but
computed exactly, over all possible test sets. `--table tails` shows what few large errors do to a mean of errors.
`--out FILE` writes the table as Markdown.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from statistics import NormalDist

import numpy as np
from scipy.special import gammaln, ndtri  # type: ignore[import-untyped]

from pipeline.contract.settings.stages import Evaluate
from pipeline.evaluate.rules import Comparison, comparison_rule
from pipeline.statistics.aggregates import Auc, Floats, Mean, Statistic
from pipeline.statistics.intervals import Interval, difference_interval, paired_proportions_interval
from pipeline.statistics.metrics import Metric
from pipeline.statistics.significance import worst_losses

CONFIDENCE = 0.95
SAMPLES = (30, 100, 300, 1000)
LEVELS = (0.5, 0.7, 0.9, 0.98, 0.995)  # of the baseline's accuracy, AUC or NDCG
CORRELATIONS = (0.0, 0.5, 0.8, 0.95)
MARGINS = (0.0, 0.01, 0.05)
_ITEMS = 20  # of a query, one of them relevant
_NEGLIGIBLE = 1e-7  # probability of test sets that are left out

Draw = Callable[[np.random.Generator, int], tuple[Statistic, Statistic]]


@dataclass(frozen=True)
class Setting:
    metric: str
    samples: int
    level: float
    correlation: float
    margin: float


@dataclass(frozen=True)
class Coverage:
    covered: float
    false_passes: float


def accuracy_coverage(samples: int, accuracy: float, correlation: float, margin: float) -> Coverage | None:
    """Return the exact coverage over all test sets; None if no two models have these accuracies and correlation."""
    worse = accuracy - margin
    both = accuracy * worse + correlation * math.sqrt(accuracy * (1 - accuracy) * worse * (1 - worse))
    gain, loss = worse - both, accuracy - both
    if min(gain, loss) < -1e-12:
        return None
    gain, loss = max(gain, 1e-15), max(loss, 1e-15)
    b, c = (counts.ravel() for counts in np.indices((samples + 1, samples + 1)))
    b, c = b[b + c <= samples], c[b + c <= samples]
    ties = samples - b - c
    logs = gammaln(samples + 1) - gammaln(b + 1) - gammaln(c + 1) - gammaln(ties + 1)
    chance = np.exp(logs + b * math.log(gain) + c * math.log(loss) + ties * math.log1p(-gain - loss))
    covered = false_passes = 0.0
    for i in np.flatnonzero(chance > _NEGLIGIBLE):
        interval = _score_interval(int(b[i]), int(c[i]), samples)
        covered += chance[i] * _contains(interval, -margin)
        false_passes += chance[i] * (interval.low > -margin)
    return Coverage(float(covered), float(false_passes))


@cache
def _score_interval(gains: int, losses: int, samples: int) -> Interval:
    return paired_proportions_interval(gains, losses, samples, CONFIDENCE)


def _contains(interval: Interval, value: float) -> bool:
    return interval.low - 1e-12 <= value <= interval.high + 1e-12


def simulated_coverage(draw: Draw, samples: int, difference: float, trials: int, seed: int) -> Coverage:
    generator = np.random.default_rng(seed)
    covered = false_passes = 0
    for _ in range(trials):
        interval = difference_interval(*draw(generator, samples), CONFIDENCE)
        covered += interval is None or _contains(interval, difference)  # None: the gate cannot decide
        false_passes += interval is not None and interval.low > difference
    return Coverage(covered / trials, false_passes / trials)


def draw_auc(level: float, correlation: float, margin: float) -> Draw:
    """Normal scores with half of the samples positive."""
    shifts = [math.sqrt(2) * float(ndtri(value)) for value in (level - margin, level)]

    def draw(generator: np.random.Generator, samples: int) -> tuple[Statistic, Statistic]:
        positive = np.arange(samples) % 2 == 0
        candidate, baseline = _correlated(generator, (samples,), correlation)
        return Auc(candidate + shifts[0] * positive, positive), Auc(baseline + shifts[1] * positive, positive)

    return draw


def draw_mae(ratio: float, correlation: float, tails: Callable[[Floats], Floats]) -> Draw:
    """Errors whose mean absolute value differs by a ratio."""

    def draw(generator: np.random.Generator, samples: int) -> tuple[Statistic, Statistic]:
        candidate, baseline = (tails(errors) for errors in _correlated(generator, (samples,), correlation))
        return Mean(baseline), Mean(ratio * candidate)  # lower is better

    return draw


def draw_ndcg(strengths: tuple[float, float], correlation: float) -> Draw:
    """Queries with one relevant item among others, whose score is higher by a strength."""

    def draw(generator: np.random.Generator, samples: int) -> tuple[Statistic, Statistic]:
        scores = _correlated(generator, (samples, _ITEMS), correlation)
        candidate, baseline = (_ndcg(each, strength) for each, strength in zip(scores, strengths, strict=True))
        return Mean(candidate, (0.0, 1.0)), Mean(baseline, (0.0, 1.0))

    return draw


def _ndcg(scores: Floats, strength: float) -> Floats:
    rank = 1 + (scores[:, 1:] > scores[:, :1] + strength).sum(axis=1)
    values: Floats = 1 / np.log2(1 + rank)
    return values


@cache
def _strength(level: float) -> float:
    """Return the strength with this mean NDCG, from the distribution of the relevant item's rank."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(200)
    discount = 1 / np.log2(2 + np.arange(_ITEMS))
    places = np.arange(_ITEMS)
    log_choose = gammaln(_ITEMS) - gammaln(places + 1) - gammaln(_ITEMS - places)

    def mean(strength: float) -> float:
        above = np.clip([NormalDist().cdf(-float(node) - strength) for node in nodes], 1e-300, 1 - 1e-16)[:, None]
        chance = np.exp(log_choose + places * np.log(above) + (_ITEMS - 1 - places) * np.log1p(-above))
        return float(weights @ (chance @ discount) / weights.sum())

    low, high = -5.0, 12.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if mean(middle) < level else (low, middle)
    return low


def _correlated(generator: np.random.Generator, shape: tuple[int, ...], correlation: float) -> tuple[Floats, Floats]:
    first, other = generator.normal(size=shape), generator.normal(size=shape)
    return first, correlation * first + math.sqrt(1 - correlation**2) * other


def coverages(metric: str, samples: int, trials: int) -> Iterator[tuple[Setting, Coverage]]:
    """Yield every setting of one metric with its coverage."""
    for level, correlation, margin in product(LEVELS, CORRELATIONS, MARGINS):
        setting = Setting(metric, samples, level, correlation, margin)
        result = _coverage(setting, trials)
        if result is not None:
            yield setting, result


def _coverage(setting: Setting, trials: int) -> Coverage | None:
    level, correlation, margin = setting.level, setting.correlation, setting.margin
    seed = hash((setting.samples, level, correlation, margin)) % 2**32
    if setting.metric == "accuracy":
        return accuracy_coverage(setting.samples, level, correlation, margin)
    if setting.metric.startswith("MAE"):
        if level != LEVELS[0]:  # an error has no level
            return None
        tails = _TAILS[setting.metric]
        mean = float(np.mean(tails(ndtri((np.arange(100_000) + 0.5) / 100_000))))
        draw = draw_mae(1 + 2 * margin, correlation, tails)
        return simulated_coverage(draw, setting.samples, -2 * margin * mean, trials, seed)
    if level - margin < 0.5:
        return None
    if setting.metric == "AUC":
        return simulated_coverage(draw_auc(level, correlation, margin), setting.samples, -margin, trials, seed)
    strengths = _strength(level - margin), _strength(level)
    return simulated_coverage(draw_ndcg(strengths, correlation), setting.samples, -margin, trials, seed)


_TAILS: dict[str, Callable[[Floats], Floats]] = {"MAE": np.abs, "MAE, long tails": lambda errors: np.exp(errors)}
METRICS = ("accuracy", "AUC", "NDCG", *_TAILS)


def table(trials: int) -> Iterator[str]:
    yield "| metric | samples | coverage, lowest | coverage, median | coverage, highest | false passes, highest |"
    yield "|---|---|---|---|---|---|"
    for metric, samples in product(METRICS, SAMPLES):
        results = [result for _, result in coverages(metric, samples, trials)]
        covered = [result.covered for result in results]
        worst = max(result.false_passes for result in results)
        numbers = (min(covered), float(np.median(covered)), max(covered), worst)
        yield f"| {metric} | {samples} | " + " | ".join(f"{number:.1%}" for number in numbers) + " |"


_TAIL_SAMPLES = (100, 400, 1600)
_TAIL_MARGIN = 0.01  # of the baseline's mean error
_BETTER = 0.2  # by which an honest candidate's errors are smaller
_RARE, _RARE_FACTOR = 0.01, 50.0


@dataclass(frozen=True)
class Tail:
    """Shares of test sets."""

    false_passes: float  # by the interval alone, of a candidate that is worse by exactly the margin
    false_passes_of_gate: float
    inconclusive: float  # of a better candidate that the interval alone would pass


def measure_tail(errors: str, samples: int, trials: int, seed: int = 0) -> Tail:
    """Compare errors of the candidate with those of a baseline without rare ones, but with the same mean."""
    generator = np.random.default_rng(seed)
    tails, rare = (np.exp if errors == "log-normal" else np.abs), errors.startswith("1 %")
    mean = math.exp(0.5) if errors == "log-normal" else math.sqrt(2 / math.pi)
    level = 1 + _RARE * (_RARE_FACTOR - 1) if rare else 1.0
    counts = np.zeros(3)
    for _ in range(trials):
        first, second = (tails(each) for each in _correlated(generator, (samples,), 0.8))
        candidate = np.where(generator.random(samples) < _RARE, _RARE_FACTOR, 1.0) * first if rare else first
        alone, gate = _passes((1 + _TAIL_MARGIN) * candidate, level * second, _TAIL_MARGIN * level * mean)
        better_alone, better_gate = _passes((1 - _BETTER) * candidate, level * second, _TAIL_MARGIN * level * mean)
        counts += alone, gate, better_alone and not better_gate
    return Tail(*(counts / trials).tolist())


def _passes(candidate: Floats, baseline: Floats, margin: float) -> tuple[bool, bool]:
    """Return whether the interval alone passes the candidate, and whether the gate does."""
    metric = Metric("mae", Mean(candidate), Mean(baseline), lower=True)
    interval, values = metric.difference(CONFIDENCE), metric.contributions()
    assert interval is not None
    comparison = Comparison(len(values), interval, 0.0, 1.0, worst=worst_losses(values, metric.differing))
    rule = comparison_rule(Evaluate(metric="mae", rule="non-inferior", margin=margin), comparison, "")
    return interval.low > -margin, rule.passed


def tail_table(trials: int) -> Iterator[str]:
    yield "| errors | " + " | ".join(f"{samples} samples" for samples in _TAIL_SAMPLES) + " |"
    yield "|---" * (1 + len(_TAIL_SAMPLES)) + "|"
    for errors in ("normal", "log-normal", "1 %, 50 times as large"):
        cells = []
        for samples in _TAIL_SAMPLES:
            tail = measure_tail(errors, samples, trials)
            cells.append(f"{tail.false_passes:.1%}/{tail.false_passes_of_gate:.1%}/{tail.inconclusive:.1%}")
        yield f"| {errors} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=4000)
    parser.add_argument("--table", choices=("intervals", "tails"), default="intervals")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    lines = []
    for line in (tail_table if arguments.table == "tails" else table)(arguments.trials):
        print(line, flush=True)
        lines.append(line)
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
