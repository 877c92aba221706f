"""The choice of the shipped variant, and its reasons."""

from __future__ import annotations

from pathlib import Path

from export.variants.choose import Choice, VariantResult, decide
from export.variants.timing import Timing
from pipeline.contract.settings.stages import Export
from pipeline.statistics.intervals import Interval

ALL = ("fp32", "fp16", "int8-dynamic", "int8-static")


def contender(name: str, estimate: float, spread: float = 0.02, *faults: str) -> VariantResult:
    share = Interval(estimate, estimate - spread, estimate + spread)
    return VariantResult(name, Path(), faults, timing=Timing({}, {}, share))


PLAIN = contender("fp32", 1.0, 0.0)
SLOW = VariantResult("fp32", Path(), ("too slow",))


def fastest(*contenders: VariantResult) -> Choice:
    return decide(Export(variants=ALL, choose="fastest-that-passes"), contenders)


def test_fastest_that_passes_is_chosen_with_its_share_of_time() -> None:
    found = fastest(PLAIN, contender("fp16", 0.8), contender("int8-static", 0.5))
    assert found.name == "int8-static"
    assert found.reasons == {
        "fp32": "passed, int8-static is faster",
        "fp16": "passed, int8-static is faster; it takes 80% of fp32's time (78% to 82%)",
        "int8-static": "chosen as the fastest that passes: takes 50% of fp32's time (48% to 52%)",
    }


def test_fastest_is_not_chosen_if_it_fails() -> None:
    found = fastest(PLAIN, contender("fp16", 0.8), contender("int8-static", 0.1, 0.01, "accuracy is gone"))
    assert (found.name, found.reasons["int8-static"]) == ("fp16", "accuracy is gone")


def test_gain_within_noise_changes_nothing() -> None:
    for other in (contender("fp16", 0.85, 0.2), contender("fp16", 0.95, 0.001), contender("fp16", 1.2)):
        found = fastest(PLAIN, other)
        assert found.name == "fp32"
        assert found.reasons["fp32"] == "chosen: none that passes saves 10% of its time beyond doubt"
        assert found.reasons["fp16"].startswith("passed, but does not save 10% of fp32's time beyond doubt; it takes")


def test_more_exact_of_two_equally_fast_is_chosen() -> None:
    assert fastest(PLAIN, contender("int8-dynamic", 0.50), contender("int8-static", 0.51)).name == "int8-static"
    assert fastest(PLAIN, contender("int8-dynamic", 0.50), contender("fp16", 0.51)).name == "fp16"
    assert fastest(PLAIN, contender("int8-dynamic", 0.50, 0.001), contender("fp16", 0.51, 0.001)).name == "int8-dynamic"


def test_fastest_other_is_chosen_if_fp32_exceeds_its_budget() -> None:
    heavy = contender("fp32", 1.0, 0.0, "too heavy")
    assert fastest(heavy, contender("fp16", 1.3), contender("int8-static", 1.1)).name == "int8-static"


def test_nothing_is_shipped_if_no_variant_passes() -> None:
    found = fastest(SLOW, contender("fp16", 0.5, 0.1, "too coarse"))
    assert found.name == ""
    assert found.refusal == "no variant passes, so nothing is shipped: fp32: too slow; fp16: too coarse"


def test_failing_named_variant_stops_the_step() -> None:
    config = Export(variants=ALL, choose="int8-static")
    broken = contender("int8-static", 0.1, 0.01, "accuracy is gone")
    found = decide(config, [PLAIN, contender("fp16", 0.9), broken])
    assert found.name == ""
    assert found.refusal == (
        "export.choose=int8-static is not shipped: accuracy is gone; choose fp32 or fp16, or fastest-that-passes"
    )
    assert found.reasons["fp32"] == "passed, nothing is shipped"
    alone = decide(config, [SLOW, broken])
    assert alone.refusal.endswith("none of the others passed either")


def test_named_variant_is_shipped_though_slower() -> None:
    found = decide(Export(variants=ALL), [PLAIN, contender("fp16", 0.2)])
    assert (found.name, found.refusal) == ("fp32", "")
    assert found.reasons == {
        "fp32": "named in export.choose",
        "fp16": "passed, export.choose=fp32 ships another; it takes 20% of fp32's time (18% to 22%)",
    }
