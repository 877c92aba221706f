"""Reports that compare two runs: numbers, curves, and differences on the same samples."""

from __future__ import annotations

import html
from pathlib import Path

import numpy as np
import pytest

from pipeline.contract.facts import read_facts
from pipeline.contract.run import Run
from pipeline.report.comparison import compare
from pipeline.report.page import write_report

from .example_runs import change, make_other_run, make_run, write_predictions


@pytest.fixture
def two(tmp_path: Path) -> tuple[Run, Run]:
    run, other = make_run(tmp_path), make_other_run(tmp_path)
    write_predictions(run, 356)
    write_predictions(other, 345)
    return run, other


def page(run: Run, other: Run) -> str:
    path = run.path / "comparison.html"
    write_report(run, path, other)
    text = path.read_text()
    assert "not in a format" not in text
    return text


def problem(run: Run, other: Run) -> str:
    compared = compare(run, read_facts(run), other, read_facts(other))
    assert not compared.metrics
    assert f"No paired difference: {html.escape(compared.problem)}" in page(run, other)
    return compared.problem


def test_difference_is_computed_on_the_same_samples(two: tuple[Run, Run]) -> None:
    run, other = two
    (row,) = compare(run, read_facts(run), other, read_facts(other)).metrics
    assert row["difference"]["estimate"] == pytest.approx(11 / 360)
    assert 0 < row["difference"]["low"] < 11 / 360 < row["difference"]["high"] < 0.06
    text = page(run, other)
    assert "better than the other on the same 360 samples" in text
    assert "11 samples only this run gets right, 0 only the other; McNemar’s exact p = 9.8×10⁻⁴" in text
    assert "+0.0306 [" in text


def test_both_runs_share_every_chart_and_differ_without_colours(two: tuple[Run, Run]) -> None:
    text = page(*two)
    for names in (
        "Loss: training, other run, validation, other run, training, validation by optimizer step",
        "Validation accuracy: accuracy, other run, accuracy by optimizer step",
        "Throughput: samples/s, other run, samples/s by optimizer step",
    ):
        assert names in text
    assert '<path d="M' in text
    assert 'class="curve two other"' in text, "dashed"
    assert 'class="dot two other"' in text, "square"
    assert text.count("<title>Time budget of ") == 2


def test_differing_part_is_listed_once_for_all_steps(two: tuple[Run, Run]) -> None:
    run, other = two
    body = run.read()
    parts = {"config:train.lr": "0.5", "pipe:train/loop.py": "a" * 64}
    steps = {name: one.model_copy(update={"parts": parts}) for name, one in body.steps.items()}
    (run.path / "run.json").write_text(body.model_copy(update={"steps": steps}).model_dump_json())
    text = page(run, other)
    assert text.count("config:train.lr") == 1
    assert "<td><code>0.5</code></td><td><code>0.001</code></td><td>prepare, train, evaluate</td>" in text
    assert "1 source file of pipe itself differs" in text
    assert f"pipe compare {other.id} {run.id}" in text


def test_runs_on_different_test_sets_are_not_compared(two: tuple[Run, Run]) -> None:
    run, other = two
    change(other.output("evaluate") / "metrics.json", test_fingerprint="x" * 64)
    assert "evaluated on different test data" in problem(run, other)


def test_comparison_that_is_impossible_explains_why(two: tuple[Run, Run]) -> None:
    run, other = two
    write_predictions(other, 345, samples=300)
    assert "different labels for the same samples" in problem(run, other)
    (other.output("evaluate") / "predictions.npz").unlink()
    assert f"run {other.id} has no per-sample predictions" in problem(run, other)
    (other.output("evaluate") / "verdict.json").unlink()
    assert "has not been evaluated" in problem(run, other)


def test_metric_with_nan_is_shown_without_a_value(two: tuple[Run, Run]) -> None:
    run, other = two
    path = other.output("evaluate") / "predictions.npz"
    with np.load(path) as arrays:
        columns = {name: arrays[name] for name in arrays.files}
    np.savez(path, allow_pickle=False, **(columns | {"candidate.accuracy": np.full(360, np.nan)}))
    text = page(run, other)
    assert '<th scope="row">accuracy</th><td class="number">–</td>' in text


def test_run_without_any_step_can_be_compared(tmp_path: Path) -> None:
    other = make_other_run(tmp_path)
    assert "Compared with the other run" in page(make_run(tmp_path, reached=0), other)
    assert "Compared with the other run" in page(other, Run(tmp_path / "20260102-030405-abcd"))
