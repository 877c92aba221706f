"""One run beside another: numbers, curves, and the difference on the same samples."""

from __future__ import annotations

import html
from pathlib import Path

import numpy as np
import pytest

from pipeline.contract.facts import read_facts
from pipeline.contract.run import Run
from pipeline.report.comparison import paired
from pipeline.report.page import write_report

from .made import change, make_other, make_run, write_predictions


@pytest.fixture
def two(tmp_path: Path) -> tuple[Run, Run]:
    run, other = make_run(tmp_path), make_other(tmp_path)
    write_predictions(run, 356)
    write_predictions(other, 345)
    return run, other


def page(run: Run, other: Run) -> str:
    path = run.path / "beside.html"
    write_report(run, path, other)
    text = path.read_text()
    assert "not of the shape" not in text
    return text


def refusal(run: Run, other: Run) -> str:
    found = paired(run, read_facts(run), other, read_facts(other))
    assert not found.metrics
    assert f"No paired difference: {html.escape(found.refused)}" in page(run, other)
    return found.refused


def test_the_difference_rests_on_the_same_samples(two: tuple[Run, Run]) -> None:
    run, other = two
    (found,) = paired(run, read_facts(run), other, read_facts(other)).metrics
    assert found["difference"]["estimate"] == pytest.approx(11 / 360)
    assert 0 < found["difference"]["low"] < 11 / 360 < found["difference"]["high"] < 0.06
    text = page(run, other)
    assert "better than the other on the same 360 samples" in text
    assert "11 samples only this run gets right, 0 only the other; McNemar’s exact p = 9.8×10⁻⁴" in text
    assert "+0.0306 [" in text


def test_both_runs_share_every_chart_and_are_told_apart_without_colours(two: tuple[Run, Run]) -> None:
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


def test_what_they_differ_in_is_said_once_for_all_steps(two: tuple[Run, Run]) -> None:
    run, other = two
    body = run.read()
    parts = {"config:train.lr": "0.5", "house:train/loop.py": "a" * 64}
    steps = {name: one.model_copy(update={"parts": parts}) for name, one in body.steps.items()}
    (run.path / "run.json").write_text(body.model_copy(update={"steps": steps}).model_dump_json())
    text = page(run, other)
    assert text.count("config:train.lr") == 1
    assert "<td><code>0.5</code></td><td><code>0.001</code></td><td>prepare, train, evaluate</td>" in text
    assert "1 source of pipe itself differs" in text
    assert f"pipe diff {other.id} {run.id}" in text


def test_two_test_sets_are_not_compared(two: tuple[Run, Run]) -> None:
    run, other = two
    change(other.output("evaluate") / "metrics.json", test_fingerprint="x" * 64)
    assert "judged on different test data" in refusal(run, other)


def test_what_cannot_be_compared_says_why(two: tuple[Run, Run]) -> None:
    run, other = two
    write_predictions(other, 345, samples=300)
    assert "other true values of the same samples" in refusal(run, other)
    (other.output("evaluate") / "predictions.npz").unlink()
    assert f"run {other.id} has no per-sample records" in refusal(run, other)
    (other.output("evaluate") / "verdict.json").unlink()
    assert "has not been judged" in refusal(run, other)


def test_a_value_that_is_no_number_is_told(two: tuple[Run, Run]) -> None:
    run, other = two
    path = other.output("evaluate") / "predictions.npz"
    with np.load(path) as arrays:
        columns = {name: arrays[name] for name in arrays.files}
    np.savez(path, allow_pickle=False, **(columns | {"candidate.accuracy": np.full(360, np.nan)}))
    text = page(run, other)
    assert '<th scope="row">accuracy</th><td class="number">–</td>' in text


def test_a_run_beside_one_that_got_nowhere_is_still_a_page(tmp_path: Path) -> None:
    other = make_other(tmp_path)
    assert "Beside the other run" in page(make_run(tmp_path, reached=0), other)
    assert "Beside the other run" in page(other, Run(tmp_path / "20260102-030405-abcd"))
