"""The page of all runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.history import load_history
from pipeline.report import write_index, write_report
from pipeline.spec.files import write_json

from .made import HOSTILE, make_other, make_run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "all runs"
    folder.mkdir()
    make_run(folder)
    make_other(folder)
    return folder


def index(runs: Path, path: Path | None = None) -> str:
    target = path or runs / "index.html"
    write_index(load_history(runs), target)
    return target.read_text()


def test_every_run_has_a_row_newest_first_with_its_numbers(runs: Path) -> None:
    page = index(runs)
    rows = re.findall(r"<tr><td.*?</tr>", page)
    assert [("abcd" in row, "ef01" in row) for row in rows] == [(True, False), (False, True)]
    for text in ("Passed", "98.9%", "+0.0250", "9.4 s", "2,411", "deploy"):
        assert text in rows[0]
    assert 'data-key="0.98889"' in rows[0]
    assert "<td>evaluate</td>" in re.sub(r' data-key="[^"]*"', "", rows[1]), "the last step it did"


def test_a_run_with_a_report_is_a_link_from_wherever_the_page_is(runs: Path, tmp_path: Path) -> None:
    assert "href=" not in index(runs)
    history = load_history(runs)
    write_report(history[0][0], history[0][0].path / "report.html")
    assert 'href="20260102-030405-abcd/report.html"' in index(runs)
    assert 'href="all%20runs/20260102-030405-abcd/report.html"' in index(runs, tmp_path / "list.html")


def test_names_are_shown_and_not_run(runs: Path) -> None:
    (hostile, _), *_ = load_history(runs)
    (hostile.path / "run.json").write_text(
        hostile.read().model_copy(update={"config": {"name": HOSTILE}}).model_dump_json()
    )
    assert index(runs).count("<script") == 1, "its own, which the policy names by digest"


def test_a_run_whose_files_are_damaged_keeps_its_row(runs: Path) -> None:
    (run, _), *_ = load_history(runs)
    (run.output("evaluate") / "verdict.json").write_text("{")
    write_json(run.output("evaluate") / "metrics.json", {"candidate": None})
    assert "Not judged yet" in index(runs)
