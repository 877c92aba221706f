"""The model card, from the same files as the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from export.model_card import describe_codec, render_card
from pipeline.contract.bundle import Ancestors
from pipeline.contract.results import Facts
from pipeline.contract.run import Acceptance, RunFile, StepRecord
from pipeline.contract.signature import Limits, Runtime, Signature, TensorSpec

FILE = RunFile(id="one", created="2026-01-01", wanted=(), config={"name": "digits"}, environment={})
ANCESTORS = Ancestors(code="a" * 64, data="b" * 64, checkpoint="c" * 64, verdict="d" * 64, onnx="e" * 64)
SIGNATURE = Signature(
    inputs=(TensorSpec(name="image", datatype="FP32", shape=("batch", 1, 8, 8)),),
    outputs=(TensorSpec(name="logits", datatype="FP32", shape=("batch", 10)),),
    codec="Digits",
    limits=Limits(max_batch_size=16, max_body_bytes=1024),
    runtime=Runtime(provider="cpu", threads=1),
)
VERDICT = {
    "verdict": "fail",
    "summary": "accuracy 0.9889 against the baseline's 0.9639",
    "samples": 360,
    "detectable": 0.017,
    "rules": [{"rule": "non-inferior", "passed": False, "detail": "accuracy may be 0.05 below"}],
    "warnings": ["the margin 0.01 is finer than\nwhat 360 samples show"],
    "slices": [
        {"slice": "ink=a|b", "samples": 90, "candidate": 0.9, "baseline": 0.8, "judged": True, "passed": False,
         "difference": {"estimate": 0.1, "low": -0.02, "high": 0.2}},
        {"slice": "ink=none", "samples": 3, "judged": False, "passed": True},
    ],
    "calibration": {"candidate": {"ece": 0.0213, "brier": 0.0187, "bins": []}, "baseline": None},
}  # fmt: skip


def made(**more: Any) -> str:
    return render_card(Facts(FILE, **more), SIGNATURE, ANCESTORS, "Pixels in, digit out.")


def test_card_of_a_minimal_run_is_rendered() -> None:
    text = made()
    assert text.startswith("# digits\n\nVerdict: **not evaluated**.\n")
    titles = [line for line in text.splitlines() if line.startswith("## ")]
    assert titles == ["## Intended use", "## Inputs and outputs", "## Limits", "## Lineage"]
    assert "| `image` | in | FP32 | batch × 1 × 8 × 8 |" in text
    assert f"| checkpoint | `{'c' * 64}` |" in text


def test_card_states_the_effect_of_padding() -> None:
    signature = SIGNATURE.model_copy(update={"padding": "padding changes answers: 7 of 9"})
    assert "\n- Padding changes answers: 7 of 9.\n" in render_card(Facts(FILE), signature, ANCESTORS)


def test_card_has_both_limits_of_an_axis() -> None:
    limits = SIGNATURE.limits.model_copy(update={"axes": {"days": 120, "rows": 9}, "shortest": {"days": 28}})
    card = render_card(Facts(FILE), SIGNATURE.model_copy(update={"limits": limits}), ANCESTORS)
    assert "\n- Axis `days`: 28 to 120.\n- Axis `rows`: 1 to 9.\n" in card


def test_card_lists_accepted_changes() -> None:
    acceptance = Acceptance(key="k", parts={}, changes="task.py changed", by="ann", at="2026-01-02")
    train = StepRecord(step="train", status="done", key="k", parts={}, accepted=(acceptance,))
    text = render_card(Facts(FILE.model_copy(update={"steps": {"train": train}})), SIGNATURE, ANCESTORS)
    assert text.endswith("Changed, and not run again:\n\n- train: task.py changed, accepted by ann, 2026-01-02\n")


def test_card_has_verdict_rules_slices_and_calibration() -> None:
    text = made(verdict=VERDICT, metrics={"classes": ["0", "1"]})
    assert "Verdict: **fail**. accuracy 0.9889 against the baseline's 0.9639\n" in text
    assert "- FAILED: non-inferior (accuracy may be 0.05 below)" in text
    assert "| ink=a¦b | 90 | 0.9 | 0.8 | +0.1 (−0.02 to +0.2) | FAILED |" in text
    assert "| expected calibration error | 0.0213 |" in text
    assert "It distinguishes 2 classes: `0`, `1`." in text
    assert "- The margin 0.01 is finer than what 360 samples show." in text
    assert "- Not compared with the baseline by themselves: ink=none." in text


def head(name: str, *shape: int, labels: tuple[str, ...] = ()) -> TensorSpec:
    return TensorSpec(name=name, datatype="FP32", shape=("batch", *shape), labels=labels)


CLASSES = ("low", "high")
METRICS = {
    "candidate": {"kind_accuracy": 0.9275, "price_error": 0.1409},
    "baseline": {"kind_accuracy": 0.5, "price_error": None},
    "intervals": {"confidence": 0.95, "candidate": {"kind_accuracy": [0.9, 0.95], "price_error": None}},
    "lower_is_better": ["price_error"],
}


def test_card_of_a_model_with_several_outputs_has_them_and_every_metric() -> None:
    outputs = (head("kind", 2, labels=CLASSES), head("price"))
    signature = SIGNATURE.model_copy(update={"outputs": outputs})
    text = render_card(Facts(FILE, metrics={**METRICS, "classes": [*CLASSES]}), signature, ANCESTORS)
    assert "It has 2 outputs: `kind`, `price`. `kind` distinguishes 2 classes: `low`, `high`.\n" in text
    assert "| `kind` | out | FP32 | batch × 2 |\n| `price` | out | FP32 | batch |\n" in text
    rows = "| kind_accuracy | higher | 0.9275 (0.9 to 0.95) | 0.5 |\n| price_error | lower | 0.1409 | – |\n"
    assert (
        f"| metric | better | candidate (95% interval) | baseline (95% interval) |\n|---|---|---|---|\n{rows}" in text
    )


@pytest.mark.parametrize(
    ("outputs", "metrics", "sentence"),
    [
        (
            [head("kind", 2), head("mask", 2)],
            {"classes": [*CLASSES]},
            "outputs: `kind`, `mask`. One distinguishes 2 cl",
        ),
        (
            [head("kind", 3), head("price")],
            {"candidate": {"kind_accuracy": 1.0}},
            "It has 2 outputs: `kind`, `price`.\n",
        ),
        ([head("price")], {"candidate": {"mae": 1.0, "rmse": 1.0}}, "\nIt estimates numbers.\n"),
        ([head("score")], {"candidate": {"ndcg": 1.0, "mrr": 1.0}}, "\nIt ranks the items of a query.\n"),
    ],
)
def test_card_states_the_kind_of_task(outputs: list[TensorSpec], metrics: dict[str, Any], sentence: str) -> None:
    signature = SIGNATURE.model_copy(update={"outputs": tuple(outputs)})
    assert sentence in render_card(Facts(FILE, metrics=metrics), signature, ANCESTORS)


def test_sentence_on_code_keeps_its_name() -> None:
    warnings = ["encode() is not compared with the model", "the margin is fine"]
    text = made(verdict={**VERDICT, "warnings": warnings})
    assert "\n- encode() is not compared with the model.\n- The margin is fine.\n" in text


def test_card_names_who_overrode_the_gate() -> None:
    word = {"at": "2026-01-03", "by": "anna", "reason": "a dry run", "verdict": "d" * 64}
    text = made(verdict=VERDICT, override=word, digests={"verdict.json": "d" * 64})
    assert "**The gate rejected this model.** It was overridden by anna, 2026-01-03: a dry run." in text


def test_card_has_variants_and_data_without_timings() -> None:
    variants = [
        {"variant": "fp32", "passed": True, "bytes": 605_321, "p50_ms": {"1": 0.271828}, "max_abs_error": 1e-6,
         "metric": {"name": "accuracy", "value": 0.98, "reference": 0.98}, "difference": None},
        {"variant": "fp16", "chosen": True, "passed": True, "bytes": 303_010,
         "note": "its ranges are narrow", "reason": "the fastest: 0.271828 ms"},
    ]  # fmt: skip
    checks = [{"check": "drift", "where": "image", "level": "warn", "detail": "PSI 0.3"}, {"check": "x", "level": "ok"}]
    data = {"splits": {"train": {"samples": 1077, "fingerprint": "f" * 64}}, "checks": checks}
    text = made(variants=tuple(variants), data=data, summary={"seconds": 271828})
    assert "| fp32 | accuracy 0.98 | – | 1×10⁻⁶ | 605,321 | passed |" in text
    assert "| fp16 (this bundle) |" in text
    assert f"| train | 1,077 | {'f' * 64} |" in text
    assert "- warn: drift of image, PSI 0.3" in text
    assert "- Its ranges are narrow." in text
    assert "271828" not in text


@pytest.mark.parametrize(
    ("source", "output"),
    [
        ('"""Pixels in."""\nclass Digits:\n    """A list of\n    greys.\n\n    More."""\n', "A list of greys."),
        ('"""Pixels in."""\nclass Digits: ...\n', "Pixels in."),
        ("class Digits: ...\n", ""),
        (None, ""),
    ],
)
def test_card_describes_the_codec(tmp_path: Path, source: str | None, output: str) -> None:
    if source:
        (tmp_path / "codec.py").write_text(source)
    assert describe_codec(tmp_path, "Digits") == output
