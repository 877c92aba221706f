"""Reports that compare two runs: numbers, curves, and differences on the same samples."""

from __future__ import annotations

import html
import re
from pathlib import Path

import numpy as np
import pytest

from pipeline.contract.results import read_facts
from pipeline.contract.run import Run
from pipeline.report.comparison import adjust_p_values, compare, run_labels
from pipeline.report.page import write_report
from pipeline.system.files import digest_file

from .example_runs import change, make_other_run, make_run, write_predictions
from .pages import section


@pytest.fixture
def two(tmp_path: Path) -> tuple[Run, Run]:
    run, other = make_run(tmp_path), make_other_run(tmp_path)
    write_predictions(run, 356)
    write_predictions(other, 345)
    return run, other


@pytest.fixture
def three(two: tuple[Run, Run], tmp_path: Path) -> tuple[Run, Run, Run]:
    third = make_other_run(tmp_path, 0.02, "20260101-010101-aa02")
    write_predictions(third, 350)
    return *two, third


def page(run: Run, *others: Run) -> str:
    path = run.path / "comparison.html"
    write_report(run, path, others)
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
    assert "better than run ef01 on the same 360 samples" in text
    assert "11 samples only this run gets right, 0 only run ef01; McNemar’s exact p = 0.0009766" in text
    assert "+0.03056 [" in text


def test_both_runs_share_every_chart_and_differ_without_colours(two: tuple[Run, Run]) -> None:
    text = page(*two)
    for names in (
        "Training loss: this run, run ef01 by optimizer step",
        "Validation loss: this run, run ef01 by optimizer step",
        "Validation accuracy: this run, run ef01 by optimizer step",
        "Throughput: this run, run ef01 by optimizer step",
    ):
        assert names in text
    assert '<path d="M' in text
    assert 'class="curve two other dash-1"' in text, "dashed"
    assert 'class="dot two other dash-1"' in text, "square"
    assert text.count("<title>Time budget of ") == 2


def test_differing_part_is_listed_once_for_all_steps(two: tuple[Run, Run]) -> None:
    run, other = two
    body = run.read()
    parts = {"config:train.lr": "0.5", "pipe:train/loop.py": "a" * 64}
    steps = {name: one.model_copy(update={"parts": parts}) for name, one in body.steps.items()}
    (run.path / "run.json").write_text(body.model_copy(update={"steps": steps}).model_dump_json())
    text = page(run, other)
    assert text.count("config:train.lr") == 1
    assert "<td><code>0.5</code></td><td><code>0.001</code></td><td>check, prepare, train, evaluate</td>" in text
    assert "1 source file of pipe itself differs" in text
    assert f"pipe compare {other.id} {run.id}" in text


def test_comparison_that_is_impossible_explains_why(two: tuple[Run, Run]) -> None:
    run, other = two
    change(other.output("evaluate") / "metrics.json", test_fingerprint="x" * 64)
    assert "evaluated on different test data" in problem(run, other)
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


def test_more_runs_have_a_column_a_curve_and_paired_differences_each(three: tuple[Run, Run, Run]) -> None:
    text = page(*three)
    shown = section(text, "Compared with other runs")
    assert "Run ef01 is <code>20260101-010101-ef01</code>" in shown
    heads = re.findall(r'<th scope="col"[^>]*>([^<]*)</th>', shown)
    assert heads[:4] == ["", "this run", "run ef01", "run aa02"]
    assert shown.count("<h3>This run and run ") == 2
    assert "+0.03056 [" in shown
    assert "+0.01667 [" in shown
    assert "<td><code>default</code></td><td><code>0.001</code></td><td><code>0.02</code></td>" in shown
    assert "Training loss: this run, run ef01, run aa02 by optimizer step" in text
    assert text.count("<title>Time budget of ") == 3


def test_p_values_are_corrected_for_all_runs_of_a_report(three: tuple[Run, Run, Run]) -> None:
    run, *others = three
    compared = [compare(run, read_facts(run), other, read_facts(other)) for other in others]
    (first,), (second,) = (each.metrics for each in adjust_p_values(compared))
    raw = sorted(row["p_value"] for each in compared for row in each.metrics)
    assert sorted((first["adjusted_p"], second["adjusted_p"])) == pytest.approx([2 * raw[0], max(2 * raw[0], raw[1])])


def test_difference_to_the_champion_has_the_interval_of_the_verdict(two: tuple[Run, Run]) -> None:
    run, other = two
    other.bundle_path.mkdir(parents=True)
    (other.bundle_path / "manifest.json").write_text("{}")
    bundle = digest_file(other.bundle_path / "manifest.json")
    change(run.output("evaluate") / "verdict.json", baseline={"kind": "champion", "bundle": bundle})
    shown = section(page(run, other), "Compared with the other run")
    assert "+0.025 [+0.00833, +0.04444]" in shown


def test_runs_with_one_ending_are_shown_by_their_whole_names() -> None:
    assert run_labels(["20260101-010101-aaaa", "20260101-010101-ef01", "20260102-010101-ef01", "nightly"]) == [
        "this run", "run 20260101-010101-ef01", "run 20260102-010101-ef01", "run nightly"
    ]  # fmt: skip


def test_run_that_failed_after_the_gate_is_not_shown_as_passed(two: tuple[Run, Run]) -> None:
    run, other = two
    body = other.read()
    failed = {**body.steps, "export": body.steps["evaluate"].model_copy(update={"step": "export", "status": "failed"})}
    (other.path / "run.json").write_text(body.model_copy(update={"steps": failed}).model_dump_json())
    shown = section(page(run, other), "Compared with the other run")
    assert shown.count("Passed") == 1
    assert "Export failed" in shown
