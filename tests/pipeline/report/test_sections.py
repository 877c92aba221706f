"""Sections of the report, from files that not every run has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.system.files import digest_file, write_json

from .complete_run import PNG, add_optional_files
from .example_runs import change, make_run
from .pages import report, section


@pytest.fixture
def page(pages: dict[str, str]) -> str:
    return pages["classifier"]


def test_slices_are_one_table_with_failed_ones_first(page: str) -> None:
    shown = section(page, "Slices")
    assert "4 slices of the test set, 3 compared with the baseline, 1 of them failed" in shown
    names = ["thick", "thin", "plain", "none"]
    assert re.findall(r'scope="row">ink=(\w+)', shown) == names
    assert shown.count("<svg") == 3, "the small slice has no interval"
    assert "−0.06 [−0.08, −0.03]" in shown
    assert "ink=thick may be 0.0800 worse" in shown


NOT_COMPARED = {"slice": "ink=thin", "samples": 90, "candidate": 0.98, "judged": False}
ALWAYS_ONE = NOT_COMPARED | {
    "baseline": 0.96, "detail": "accuracy 0.98 against 0.96; the baseline always answers 1: not evaluated"
}  # fmt: skip
LATER = {"number": 3, "level": "99.17%", "text": "comparison 3 on this test set, interval at 99.17% instead of 95%"}
MATRIX = [[5 if i == j else int(j == i + 1) for j in range(100)] for i in range(100)]


@pytest.mark.parametrize(
    ("name", "values", "title", "shown", "hidden"),
    [
        ("verdict.json", {}, "Verdict", "with its 95% interval. The", ""),
        ("verdict.json", {"comparison": LATER}, "Verdict", f"with its 99.17% interval ({LATER['text']}). The", ""),
        ("verdict.json", {"difference": None, "mcnemar": None}, "Verdict", "is not a finite number", "<svg"),
        ("metrics.json", {"candidate": {"accuracy": None}}, "Verdict", '<td class="number">–</td>', "None"),
        (
            "verdict.json", {"slices": [NOT_COMPARED]}, "Slices",
            "1 slice of the test set, compared with no baseline", "large enough",
        ),
        (
            "verdict.json", {"slices": [ALWAYS_ONE] * 2}, "Slices",
            "2 slices of the test set, none compared with the baseline: the baseline always answers 1.", "0 compared",
        ),
        (
            "metrics.json", {"classes": [f"class {i}" for i in range(100)], "confusion": MATRIX}, "Confusion matrix",
            "class 0 taken for class 1", 'class="heat"',
        ),
    ],
)  # fmt: skip
def test_evaluation_is_shown_as_recorded(
    tmp_path: Path, name: str, values: dict[str, Any], title: str, shown: str, hidden: str
) -> None:
    run = make_run(tmp_path)
    change(run.output("evaluate") / name, **values)
    content = section(report(run), title)
    assert shown in content
    assert not hidden or hidden not in content


def test_one_difference_has_one_interval(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    narrow = {"estimate": 0.025, "low": 0.02, "high": 0.03}
    change(run.output("evaluate") / "metrics.json", intervals={"confidence": 0.95, "difference": {"accuracy": narrow}})
    assert "all other intervals" not in report(run)
    level = {"number": 2, "level": "98.3%", "text": "comparison 2 on this test set, interval at 98.3% instead of 95%"}
    change(run.output("evaluate") / "verdict.json", confidence=0.98333, comparison=level)
    shown = section(report(run), "Verdict")
    assert "+0.025 [+0.00833, +0.04444]" in shown
    assert "+0.02, +0.03" not in shown
    assert "has the interval of the verdict; all other intervals are at 95%." in shown


def test_metrics_have_intervals_and_name_the_better_direction(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    intervals = {
        "candidate": {"mae": [1.5, 2.5], "r2": None},
        "baseline": {"mae": [2.5, 3.5], "r2": None},
        "difference": {"mae": {"estimate": 1.0, "low": 0.5, "high": 1.5}, "r2": None},
    }
    more = {"lower_is_better": ["mae"], "undefined": {"r2": "all true values are equal"}, "intervals": intervals}
    body = {
        "candidate": {"mae": 2.25, "r2": None},
        "baseline": {"mae": 3.25, "r2": None},
        "classes": None,
        "per_class": None,
    }
    change(run.output("evaluate") / "metrics.json", **body, **more)
    shown = [{"index": 3, "actual": "1.5", "predicted": "2.25", "metrics": {}, "shown": []}]
    write_json(run.output("evaluate") / "worst.json", {"metric": "mae", "samples": shown})
    page = report(run)
    table = section(page, "Verdict")
    assert "mae<small>lower is better</small>" in table
    assert "r2<small>undefined: all true values are equal</small>" in table
    assert '2.25<small class="beside"> [1.5, 2.5]</small>' in table
    assert "+1 [+0.5, +1.5]" in table
    assert "is 1.5, predicted 2.25" in section(page, "Worst samples")


def test_calibration_is_drawn_for_candidate_and_baseline(page: str) -> None:
    shown = section(page, "Calibration")
    assert '<td class="number">0.0213</td><td class="number">0.0534</td>' in shown
    assert shown.count('class="curve one"') == shown.count('class="curve two other"') == 1
    assert "candidate: 95.0% stated, 97.8% right (95.8% to 99.1%), 326 answers" in shown


def test_worst_samples_are_images_texts_or_numbers(page: str) -> None:
    shown = section(page, "Worst samples")
    assert f'<img class="pixels" src="data:image/png;base64,{PNG}" alt="image of sample 0">' in shown
    assert "<blockquote>def first(row):\n    return row[0] …</blockquote>" in shown
    assert "0.25, –, −1.5 …" in shown
    assert shown.count("is 8, taken for 1; baseline: 8") == 3


def test_variants_show_the_shipped_one_and_the_first_wrong_node(page: str) -> None:
    shown = section(page, "Variants")
    assert "fp16<b>← shipped</b>" in shown
    assert "First wrong at /head/Gemm (MatMulInteger), error 3.25." in shown
    assert "295.9 KiB (50%)" in shown
    assert "0.21 ms" in shown
    assert "chain is broken" not in page, "though another variant is shipped"
    assert "onnx2tf is not installed" in section(page, "Formats")


def test_latency_of_the_file_is_shown_before_deployment(tmp_path: Path) -> None:
    run = make_run(tmp_path, reached=5)
    add_optional_files(run)
    shown = section(report(run), "Service and latency")
    assert "the fp16 file itself took" in shown
    assert "0.24 ms" in shown


def test_data_checks_list_warnings_first(page: str) -> None:
    shown = section(page, "Data")
    assert shown.index("! warning") < shown.index("✓ passed")
    assert "PSI is high" in shown


def test_lineage_is_a_graph_with_full_digests(page: str) -> None:
    shown = section(page, "Lineage")
    assert shown.count("<svg") == 2, "one for wide windows, one for narrow ones"
    assert shown.count('class="edge"') == 2 * 8
    assert f"<title>checkpoint\n{'c' * 64}</title>" in shown


def test_settings_that_differ_from_the_default_are_listed(tmp_path: Path) -> None:
    config = {"name": "digits", "train": {"lr": 0.5, "epochs": 10, "clip_norm": 1}, "gone": {"word": 1}}
    shown = section(report(make_run(tmp_path, config=config)), "Configuration")
    assert '<th scope="row">train.lr</th><td><code>0.5</code></td><td><code>0.001</code></td>' in shown
    assert '<th scope="row">gone</th>' in shown, "a section of another version"
    rows = shown[: shown.index("<details>")]
    assert "train.epochs" not in rows
    assert "train.clip_norm" not in rows


def test_only_an_override_of_this_verdict_is_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path, reached=4)
    path = run.output("evaluate") / "verdict.json"
    change(path, verdict="fail")
    override = {"at": "2026-01-03", "by": "anna", "reason": "only a dry run", "verdict": "f" * 64}
    write_json(run.path / "override.json", override)
    assert "dry run" not in report(run)
    change(run.path / "override.json", verdict=digest_file(path))
    page = report(run)
    assert "Overridden by anna, 2026-01-03: only a dry run" in page
    assert "Rejected" not in page


def test_sections_that_do_not_apply_are_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    page = report(run)
    for title in ("Slices", "Variants", "Worst samples", "Formats", "Predicted against actual", "NDCG by query"):
        assert f"<h2>{title}" not in page
    assert "the task has no probabilities()" in section(page, "Calibration")
    change(run.output("evaluate") / "metrics.json", classes=None, per_class=None, confusion=None)
    page = report(run)
    for title in ("Calibration", "Confusion matrix", "Per class"):
        assert f"<h2>{title}" not in page


def test_champion_is_shown_as_recorded_at_evaluation_time(tmp_path: Path) -> None:
    run, bundle = make_run(tmp_path), "c" * 64
    change(run.output("evaluate") / "verdict.json", baseline={"kind": "champion", "bundle": bundle})
    assert "the champion cccccccccccc, on the same" in report(run)
    champion = {"run": "older", "bundle": bundle, "at": "2026-01-01", "by": "ann@here", "reason": "deployed"}
    write_json(run.output("evaluate") / "champion.json", {**champion, "registry": "s3://team/models"})
    who = "the champion cccccccccccc of run older (champion since 2026-01-01 by ann@here: deployed, fetched from the "
    assert f"{who}registry s3://team/models), on the same" in report(run)
