"""The report of one run and the index of all runs."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest

from pipeline.contract.run import STEPS
from pipeline.history import load_history
from pipeline.report.charts import thin, ticks
from pipeline.report.page import write_index, write_report
from pipeline.system.files import write_atomic, write_json

from .example_runs import make_other_run, make_run
from .pages import report


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "all runs"
    folder.mkdir()
    make_run(folder)
    make_other_run(folder)
    return folder


def index(runs: Path, path: Path | None = None) -> str:
    target = path or runs / "index.html"
    write_index(load_history(runs), target)
    return target.read_text()


def test_index_lists_runs_newest_first_with_their_numbers(runs: Path) -> None:
    page = index(runs)
    rows = re.findall(r"<tr data-facts.*?</tr>", page)
    assert [("abcd" in row, "ef01" in row) for row in rows] == [(True, False), (False, True)]
    for text in ("Passed", "98.9%", "+0.025", "9.4 s", "2,411", "deploy"):
        assert text in rows[0]
    assert 'data-key="0.98889"' in rows[0]
    assert "<td>evaluate</td>" in re.sub(r' data-key="[^"]*"', "", rows[1]), "its last step"


def test_index_links_to_reports_relative_to_its_own_folder(runs: Path, tmp_path: Path) -> None:
    assert "href=" not in index(runs)
    history = load_history(runs)
    write_report(history[0][0], history[0][0].path / "report.html")
    assert 'href="20260102-030405-abcd/report.html"' in index(runs)
    assert 'href="all%20runs/20260102-030405-abcd/report.html"' in index(runs, tmp_path / "list.html")


@pytest.mark.parametrize("reached", range(len(STEPS) + 1))
def test_run_that_stopped_after_any_step_is_shown_as_far_as_it_came(tmp_path: Path, reached: int) -> None:
    page = report(make_run(tmp_path, reached))
    assert "digits" in page
    assert ("Not reached" in page) == (reached < len(STEPS))


def test_report_shows_the_main_numbers(tmp_path: Path) -> None:
    page = report(make_run(tmp_path))
    for text in ("Passed", "98.9%", "+0.025", "+0.0083", "4.8×10⁻⁶", "2,411", "1.84 ms", "360", "p = 0.0117"):
        assert text in page
    assert "pipe repro 20260102-030405-abcd" in page
    assert "8 taken for 1" in page


def test_rejected_run_shows_the_reason(tmp_path: Path) -> None:
    run = make_run(tmp_path, reached=4)
    file = run.read()
    reason = "candidate rejected: accuracy 0.9 is 0.05 below the required 0.95"
    rejected = file.steps["evaluate"].model_copy(update={"status": "rejected", "reason": reason})
    steps = {**file.steps, "evaluate": rejected}
    write_atomic(run.path / "run.json", file.model_copy(update={"steps": steps}).model_dump_json())
    body = json.loads((run.output("evaluate") / "verdict.json").read_text()) | {"verdict": "fail"}
    write_json(run.output("evaluate") / "verdict.json", body)
    run.output("evaluate").rename(run.partial("evaluate"))
    page = report(run)
    assert "Rejected" in page
    assert reason in page
    assert "98.9%" in page


def test_broken_digest_chain_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert "chain is broken" not in report(run)
    path = run.output("evaluate") / "verdict.json"
    write_json(path, json.loads(path.read_text()) | {"checkpoint": "f" * 64})
    assert "chain is broken at checkpoint, verdict" in report(run)
    data = run.output("prepare") / "data.json"
    assert "pretrained weights" not in report(run)
    write_json(data, json.loads(data.read_text()) | {"pretrained": "e" * 64})
    assert "pretrained weights" in report(run)


def test_long_curve_is_thinned_and_keeps_its_last_value() -> None:
    points = [(float(i), float(i % 7)) for i in range(100_001)]
    thinned = thin(points)
    assert len(thinned) <= 302
    assert thinned[-1] == points[-1]


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-0.013, 0.044), (1e-7, 9e-7), (0, 251_000), (0.99, 0.9901)])
def test_ticks_are_few_and_within_the_range(low: float, high: float) -> None:
    values = ticks(low, high)
    assert 2 <= len(values) <= 6
    assert low - 1e-9 <= values[0] < values[-1] <= high * (1 + 1e-9)


@pytest.mark.parametrize(
    ("step", "status", "text"),
    [
        ("export", "failed", "Export failed"),
        ("train", "interrupted", "Train interrupted"),
        ("deploy", "failed", "Deploy failed"),
    ],
)
def test_run_that_was_stopped_is_not_headed_by_its_verdict(runs: Path, step: str, status: str, text: str) -> None:
    (run, body), *_ = load_history(runs)
    steps = {**body.steps, step: body.steps[step].model_copy(update={"status": status, "reason": "no memory"})}
    write_atomic(run.path / "run.json", body.model_copy(update={"steps": steps}).model_dump_json())
    page = report(run)
    (head,) = re.findall(r'<p class="decision">(.*?)</p>', page, re.DOTALL)
    row = re.findall(r"<tr data-facts.*?</tr>", index(runs))[0]
    for shown in (head, row):
        assert text in shown
        assert "gate: passed" in shown
        assert "✓" not in shown


def test_index_shows_commits_and_settings_that_differ(runs: Path) -> None:
    (run, body), *_ = load_history(runs)
    environment = {"git commit": "0123456789" * 4, "git working tree": "uncommitted changes"}
    config = {**body.config, "train": {"lr": 0.5}}
    changed = body.model_copy(update={"environment": environment, "config": config})
    write_atomic(run.path / "run.json", changed.model_dump_json())
    first, second = re.findall(r"<tr data-facts.*?</tr>", index(runs))
    assert "<code>0123456</code><small>changed files</small>" in first
    assert "train.lr 0.5" in first
    assert "evaluate.margin" not in re.sub(r'data-facts="[^"]*"', "", first), "the same in both"
    assert json.loads(html.unescape(re.findall(r'data-facts="([^"]*)"', first)[0]))["accuracy"] == 0.98889
    assert "0123456" not in second
