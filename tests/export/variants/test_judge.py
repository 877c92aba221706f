"""Rules that a variant must satisfy, on hand-made numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from export.variants.judge import (
    Answers,
    BatchSizeResult,
    Deviation,
    budget_faults,
    evaluate_variant,
    find_faults,
    measure_deviation,
    output_scale,
)
from export.variants.timing import Timing
from pipeline.contract.codec import Array
from pipeline.contract.settings.stages import Evaluate, Export
from pipeline.statistics.aggregates import Mean
from pipeline.statistics.intervals import Interval
from pipeline.statistics.metrics import Metric
from pipeline.system.errors import StageError

NEAR = Deviation(0.0, 0.0, 0.0)
RIGHT = np.ones(100)
EVALUATE = Evaluate(champion_margin=0.08)


def few_wrong(count: int) -> Array:
    return np.where(np.arange(100) < count, 0.0, 1.0)


def message(
    name: str, *answers: BatchSizeResult, evaluate: Evaluate = EVALUATE, export: Export | None = None
) -> list[str]:
    result = evaluate_variant(evaluate, answers)
    return list(find_faults(name, export or Export(), evaluate, result, Answers(answers, [])))


def of(values: Array, size: int = 1, found: Deviation = NEAR) -> BatchSizeResult:
    return BatchSizeResult(size, found, {"accuracy": Metric("accuracy", Mean(values), Mean(RIGHT))})


def error(values: Array) -> BatchSizeResult:
    return BatchSizeResult(1, NEAR, {"mae": Metric("mae", Mean(values), Mean(RIGHT), lower=True)})


def test_worst_batch_size_decides() -> None:
    assert message("int8-dynamic", of(RIGHT), of(few_wrong(1), 7)) == []
    (fault,) = message("int8-dynamic", of(RIGHT), of(few_wrong(9), 7), of(few_wrong(1), 256))
    assert fault.startswith("accuracy is 0.9100 at batch size 7, in torch 1.000: the lower bound -0.1")
    assert fault.endswith("of the difference misses the margin of -0.08")


def test_larger_error_fails_and_a_smaller_one_passes() -> None:
    evaluate = Evaluate(metric="mae", champion_margin=0.08, require={"mae": 1.05})
    assert message("int8-dynamic", error(RIGHT - 0.5), evaluate=evaluate) == []
    margin, limit = message("int8-dynamic", error(RIGHT + 0.1), evaluate=evaluate)
    assert margin.startswith("mae is 1.100 at batch size 1, in torch 1.000: the lower bound -0.1")
    assert limit == "mae 1.100 is above the required 1.05, which torch's answers reach"


def test_limits_of_calibration_hold_for_variants() -> None:
    def brier(value: float) -> Metric:
        return Metric("brier", Mean(RIGHT * value), Mean(RIGHT * 0.1), lower=True)

    metrics = {"accuracy": Metric("accuracy", Mean(RIGHT), Mean(RIGHT))}
    evaluate = Evaluate(champion_margin=0.08, require={"brier": 0.2})
    assert message("int8", BatchSizeResult(1, NEAR, {**metrics, "brier": brier(0.15)}), evaluate=evaluate) == []
    (fault,) = message("int8", BatchSizeResult(1, NEAR, {**metrics, "brier": brier(0.3)}), evaluate=evaluate)
    assert fault == "brier 0.3000 is above the required 0.2, which torch's answers reach"


def test_own_margin_of_variants_is_applied() -> None:
    wrong = of(few_wrong(4))
    assert message("int8-static", wrong, evaluate=Evaluate(champion_margin=0.2)) == []
    assert message("int8-static", wrong, evaluate=Evaluate(champion_margin=0.2), export=Export(variant_margin=0.001))
    assert message("int8-static", of(RIGHT), export=Export(variant_margin=0)) == []  # equal on every sample


def test_rounding_of_fp32_is_no_fault() -> None:
    values = RIGHT - 1e-9 * np.arange(100)
    assert message("fp32", of(values), evaluate=Evaluate(champion_margin=0)) == []
    assert message("fp16", of(values), evaluate=Evaluate(champion_margin=0))


def test_metric_that_is_no_number_is_named_and_not_compared() -> None:
    assert message("fp16", of(np.where(np.arange(100) == 3, np.nan, 1.0))) == [
        "accuracy is not finite on every test sample"
    ]


def test_errors_that_a_metric_does_not_see_are_bounded_for_each_kind() -> None:
    coarse = of(RIGHT, found=Deviation(3.0, 0.3, 0.02))
    assert message("int8-static", coarse) == []
    assert "0.3 standard deviations off; 0.05 are allowed" in message("fp16", coarse)[0]
    assert "off by 0.7 standard deviations" in message("int8-static", of(RIGHT, found=Deviation(9, 2, 0.7)))[0]


def test_required_metric_that_torch_misses_is_not_applied() -> None:
    assert message("fp32", of(RIGHT), evaluate=Evaluate(require={"accuracy": 2.0, "another": 1.0})) == []


@pytest.mark.parametrize(
    ("low", "high", "message"),
    [
        (1.0, 1.9, ""),
        (2.1, 2.4, "p50_ms is 2.2 (at least 2.1), over export.budget p50_ms=2"),
        (1.9, 2.4, "p50_ms lies between 1.9 and 2.4, which does not show whether it keeps export.budget p50_ms=2"),
        (1.9, math.inf, "p50_ms lies between 1.9 and more than the slowest call"),
    ],
)
def test_budget_is_kept_when_the_whole_interval_is_within(low: float, high: float, message: str) -> None:
    timing = Timing({1: Interval(2.2, low, high)}, {1: Interval(9, 9, 9)}, Interval(1, 1, 1))
    found = list(budget_faults({"p50_ms": 2}, 5, timing))
    assert found == [] if not message else found[0].startswith(message)


def test_equal_infinities_have_no_deviation() -> None:
    masked = np.array([[0.0, -np.inf], [2.0, 1.0]], np.float32)
    spread = {"y": output_scale(masked)}
    assert spread["y"] == pytest.approx(np.std([0, 2, 1]))
    assert measure_deviation({"y": masked}, {"y": masked + np.float32(0)}, spread) == NEAR
    half = measure_deviation({"y": masked}, {"y": np.array([[0.5, -np.inf], [2.0, 1.0]], np.float32)}, spread)
    assert half.largest == 0.5
    assert half.noise == pytest.approx(0.25 / spread["y"])
    for bad in (np.nan, np.inf):
        found = measure_deviation(
            {"y": masked}, {"y": np.where(np.isinf(masked), bad, masked).astype(np.float32)}, spread
        )
        assert found.largest == found.noise == np.finfo(np.float64).max
    with pytest.raises(
        StageError, match=r"it answers `y` as float32 of shape \[2\], torch as float32 of shape \[2, 2\]"
    ):
        measure_deviation({"y": masked}, {"y": masked[0]}, spread)
    assert output_scale(np.full(3, -4.0)) == 4.0
    assert output_scale(np.zeros(0)) == 1.0
