"""What a variant must prove before it may be shipped; pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from export.variants.answers import Answers, Apart, Reference
from export.variants.timing import Timing
from pipeline.spec.exporting import Cost, Export
from pipeline.spec.sections import Evaluate
from pipeline.spec.statistics.interval import Interval, mean_interval

FEWEST = 2  # samples an interval takes


@dataclass(frozen=True)
class Judged:
    """Of all batch sizes, the one where the metric may be worst."""

    size: int
    samples: int
    value: float
    reference: float
    difference: Interval | None  # None where a value is not finite


def judged(config: Evaluate, reference: Reference, answers: Sequence[Answers]) -> Judged:
    """The paired interval of the task's metric, the file against torch on the same samples.

    The file must pass at every batch size, so that the worst decides; no correction for several looks is due to who
    must pass them all.
    """
    return min((_judged(config, reference, one) for one in answers), key=_lowest)


def _judged(config: Evaluate, reference: Reference, answers: Answers) -> Judged:
    own, torch = answers.metrics[config.metric], reference.metrics[config.metric]
    apart = own - torch
    finite = bool(np.isfinite(apart).all())
    difference = mean_interval(apart, config.confidence, config.resamples, config.seed) if finite else None
    return Judged(answers.size, len(own), float(own.mean()), float(torch.mean()), difference)


def _lowest(one: Judged) -> float:
    return -math.inf if one.difference is None else one.difference.low


def margin_of(export: Export, evaluate: Evaluate) -> float:
    return evaluate.margin if export.variant_margin == "evaluate.margin" else export.variant_margin


def faults(
    name: str,
    export: Export,
    evaluate: Evaluate,
    found: Judged,
    reference: Reference,
    answers: Sequence[Answers],
    shapes: Sequence[Apart],
) -> Iterator[str]:
    """Every rule that is not kept, as a sentence; none where all are.

    fp32 was proven number by number: its metric is told, but a margin of 0 must not fall over the last digit.
    """
    yield from _not_finite(answers)
    if name != "fp32":
        yield from _inferior(evaluate, margin_of(export, evaluate), found)
    yield from _below_floors(evaluate, reference, answers)
    yield from _apart(name, export, Apart.worst(*(one.apart for one in answers)), "the test set")
    if shapes:
        yield from _apart(name, export, Apart.worst(*shapes), "shapes that were never traced")


def over_budget(budget: Mapping[Cost, float], size_bytes: int, timing: Timing | None) -> Iterator[str]:
    """A budget is kept when the whole interval of the time lies within it."""
    for cost, limit in budget.items():
        if cost == "megabytes":
            if size_bytes > limit * 1e6:
                yield f"{size_bytes / 1e6:.3g} MB exceed export.budget megabytes={limit:g}"
            continue
        assert timing is not None, "who sets a budget of time has it measured"
        found = (timing.p50_ms if cost == "p50_ms" else timing.p99_ms)[1]
        if found.low > limit:
            yield f"{cost} is {found.estimate:.3g} (at least {found.low:.3g}), over export.budget {cost}={limit:g}"
        elif found.high > limit:
            high = f"and {found.high:.3g}" if math.isfinite(found.high) else "and more than the slowest call"
            yield (
                f"{cost} lies between {found.low:.3g} {high}, which does not tell whether it keeps export.budget "
                f"{cost}={limit:g}; raise export.timing_seconds, or measure on a machine that does nothing else"
            )


def _not_finite(answers: Sequence[Answers]) -> Iterator[str]:
    found = {name for one in answers for name, values in one.metrics.items() if not np.isfinite(values).all()}
    if found:
        yield f"{', '.join(sorted(found))} is not finite on every test sample"


def _inferior(config: Evaluate, margin: float, found: Judged) -> Iterator[str]:
    """As the gate judges a candidate: the interval's lower bound lies above the margin, or nothing differs at all."""
    if found.difference is None:
        return  # told already
    if found.samples < FEWEST:
        yield f"{config.metric} cannot be judged on a single test sample"
    elif found.difference.low <= -margin and found.difference != Interval(0.0, 0.0, 0.0):
        yield (
            f"{config.metric} is {found.value:.4f} at batch size {found.size}, in torch {found.reference:.4f}: the "
            f"lower bound {found.difference.low:+.4f} of the difference misses the margin of {-margin:+.4g}"
        )


def _below_floors(config: Evaluate, reference: Reference, answers: Sequence[Answers]) -> Iterator[str]:
    """Floors that torch's own answers reach; one they miss was forgiven by a person."""
    for name, floor in sorted(config.require.items()):
        if name not in reference.metrics or float(reference.metrics[name].mean()) < floor:
            continue
        lowest = min(float(one.metrics[name].mean()) for one in answers)
        if lowest < floor:
            yield f"{name} {lowest:.4f} is below the required {floor:g}, which torch's answers reach"


def _apart(name: str, export: Export, found: Apart, where: str) -> Iterator[str]:
    """Far looser than the tolerances of fp32: it is the metric that judges, this stops what a metric may not see."""
    if name == "fp16" and found.share > export.fp16_tolerance:
        yield (
            f"on {where}, an answer is {found.share:.3g} standard deviations off, over "
            f"export.fp16_tolerance={export.fp16_tolerance:g}"
        )
    if name.startswith("int8") and found.noise > export.int8_noise:
        yield (
            f"on {where}, answers are off by {found.noise:.3g} standard deviations (root mean square), over "
            f"export.int8_noise={export.int8_noise:g}"
        )
