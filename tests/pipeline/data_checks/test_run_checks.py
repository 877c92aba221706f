from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.contract.config import Config, override_config
from pipeline.contract.data import Samples
from pipeline.contract.registry import CHAMPION, Entry, ProposedChange, Registry, change_registry, read_registry
from pipeline.contract.run import Run, StepRecord
from pipeline.contract.settings.stages import Prepare
from pipeline.data_checks.champion import (
    CHAMPION_PART,
    NO_CHAMPION,
    champion_profile,
    comparable_champion,
    missing_champion_note,
    recorded_champion,
)
from pipeline.data_checks.rules import CheckResult
from pipeline.data_checks.run_checks import check_overlap, read_column, write_checks
from pipeline.history import Project
from pipeline.plan import key_parts
from pipeline.system.errors import BundleError, ConfigError
from pipeline.system.files import digest_tree

from .conftest import Check, alarms, alarms_of, new_run, normal

TRAIN = {"x": normal(300, 4), "label": np.arange(300) % 3}
TEST = {"x": normal(120, 4, seed=1), "label": np.arange(120) % 3}


def promoted_run(runs: Path, name: str, parts: Mapping[str, str]) -> Run:
    """Create a run prepared from these parts and make it the champion."""
    run = new_run(runs.parent, name)
    record = StepRecord(step="prepare", status="done", key="k", parts=parts)
    body = run.read().model_copy(update={"steps": {"prepare": record}})
    (run.path / "run.json").write_text(body.model_dump_json())
    change_registry(runs, "", lambda _: ProposedChange(CHAMPION, entry(name), "deployed"))
    return run


def entry(name: str) -> Entry:
    return Entry(bundle=f"bundle of {name}", checkpoint=f"of {name}", path=f"{name}/export/bundle")


def name_of(found: Entry | None) -> str | None:
    return found.bundle.removeprefix("bundle of ") if found else None


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def test_data_is_compared_with_the_newest_champion_on_other_data(runs: Path) -> None:
    def found(data: str) -> str | None:
        return name_of(comparable_champion(read_registry(runs, ""), runs, {"data": data}))

    assert found("old") is None
    promoted_run(runs, "a", {"data": "old", CHAMPION_PART: NO_CHAMPION})
    assert (found("old"), found("new")) == (None, "a")
    promoted_run(runs, "b", {"data": "new", CHAMPION_PART: "bundle of a"})
    assert (found("old"), found("new")) == ("b", "a"), "not compared with its own data"
    promoted_run(runs, "c", {"data": "new", CHAMPION_PART: "bundle of a"})
    assert found("new") == "a"
    shutil.rmtree(runs / "a")
    assert found("new") is None, "a deleted run cannot be compared"


def test_champion_changes_the_key_of_other_data_only(config: Config, project: Project, runs: Path) -> None:
    before = key_parts("prepare", config, project, {})
    assert before[CHAMPION_PART] == NO_CHAMPION
    promoted_run(runs, "mine", before)
    assert key_parts("prepare", config, project, {}) == before, "an unchanged rerun reuses what it has"
    other = override_config(config, ["prepare.copies=off"])
    theirs = key_parts("prepare", other, project, {})
    assert theirs[CHAMPION_PART] == "bundle of mine"
    promoted_run(runs, "theirs", theirs)
    assert key_parts("prepare", other, project, {}) == theirs


def test_step_uses_the_champion_in_its_key(runs: Path) -> None:
    promoted_run(runs, "a", {"data": "old"})
    run = new_run(runs.parent, "mine")
    record = StepRecord(step="prepare", status="running", key="k", parts={"data": "new", CHAMPION_PART: "bundle of a"})
    (run.path / "run.json").write_text(run.read().model_copy(update={"steps": {"prepare": record}}).model_dump_json())
    promoted_run(runs, "b", {"data": "newer"})
    assert name_of(recorded_champion(read_registry(runs, ""), runs, run)) == "a"
    assert name_of(recorded_champion(read_registry(runs, ""), runs, new_run(runs.parent, "without"))) == "b"


def test_a_champions_profile_that_was_replaced_is_refused(runs: Path, check: Check) -> None:
    champion = promoted_run(runs, "champion", {"data": "old"})
    champion.output("prepare").mkdir()
    write_checks(check(TRAIN, TEST, classes="abc"), champion.output("prepare"))
    body = champion.read()
    record = body.steps["prepare"].model_copy(update={"outputs": digest_tree(champion.output("prepare"))})
    (champion.path / "run.json").write_text(body.model_copy(update={"steps": {"prepare": record}}).model_dump_json())
    promoted = read_registry(runs, "").names[CHAMPION]
    assert champion_profile(promoted, runs) is not None
    (champion.output("prepare") / "profile.json").write_text("{}")
    with pytest.raises(BundleError, match=r"profile\.json: changed since it was recorded"):
        champion_profile(promoted, runs)


def check_with_champion(runs: Path, check: Check, train: Any, **words: Any) -> Any:
    """Check data against a champion that was trained on TRAIN."""
    before = check(TRAIN, TEST, classes="abc")
    champion = promoted_run(runs, "champion", {"data": "old"})
    champion.output("prepare").mkdir()
    write_checks(before, champion.output("prepare"))
    test = {name: column[:120] for name, column in train.items()}
    return check(train, test, **{"classes": "abc", **words})


def test_similar_data_passes(runs: Path, check: Check, tmp_path: Path) -> None:
    found = check_with_champion(runs, check, {"x": normal(400, 4, seed=7), "label": np.arange(400) % 3})
    assert alarms(found) == []
    assert {one.check for one in found.results if one.against == "champion"} == {"schema", "range", "drift", "labels"}
    write_checks(found, tmp_path)
    body = json.loads((tmp_path / "checks.json").read_text())
    assert body["champion"] == {"bundle": "bundle of champion", "run": "champion"}


def test_drift_since_the_champion_is_reported_by_feature(runs: Path, check: Check) -> None:
    x = normal(400, 4, seed=7) + np.array([0, 1.5, 0, 0], np.float32)
    found = check_with_champion(runs, check, {"x": x, "label": np.zeros(400, np.int64)}, drift="error")
    (drifted,) = [one for one in alarms_of(found, "drift") if one.against == "champion"]
    assert (drifted.where, drifted.level) == ("train.x[1]", "error")
    assert drifted.detail.startswith("other values since the champion was trained (KS distance")
    assert [one.where for one in alarms_of(found, "labels") if one.against == "champion"] == ["train.class label"]


@pytest.mark.parametrize(
    ("change", "classes", "message"),
    [
        ({"x": normal(400, 4).astype(np.float64)}, "abc", "type float64, not float32 as the champion was trained on"),
        ({"x": normal(400, 4), "more": normal(400)}, "abc", "the champion's data has no such input"),
        ({"x": normal(400, 4)}, "acb", "another order, so every index means another class"),
    ],
)
def test_columns_and_classes_other_than_the_champions_stop_the_pipeline(
    runs: Path, check: Check, change: Any, classes: str, message: str
) -> None:
    found = check_with_champion(runs, check, {**change, "label": np.arange(400) % 3}, classes=classes)
    (finding,) = alarms_of(found, "schema")
    assert finding.level == "error"
    assert message in finding.detail
    assert "set prepare.columns=warn" in finding.detail or classes == "acb"


def test_missing_or_old_champion_run_is_noted(runs: Path, check: Check) -> None:
    champion = promoted_run(runs, "champion", {"data": "old"})
    assert any("has no prepare/profile.json" in note for note in check(TRAIN, TEST, classes="abc").notes)
    shutil.rmtree(champion.path)
    registry = read_registry(runs, "")
    assert missing_champion_note(registry, runs) in check(TRAIN, TEST, classes="abc").notes
    assert "the champion's run champion is not here" in missing_champion_note(registry, runs)
    assert missing_champion_note(Registry(), runs) == ""


def test_splits_of_unequal_widths_are_reported(check: Check) -> None:
    data = check({"x": normal(300, 12)}, {"x": normal(120, 11, seed=1)}, copies="error")
    assert [result.where for result in alarms_of(data, "schema")] == ["validation.x", "test.x"]


def _times(**first: int) -> dict[str, Any]:
    return {name: np.arange(start, start + 10.0) for name, start in first.items()}


def test_splits_in_time_order_pass_and_no_column_means_no_check() -> None:
    assert list(check_overlap(_times(train=0, validation=10, test=20), {}, Prepare(time_column="day"))) == []
    assert list(check_overlap({}, {}, Prepare())) == []


def test_test_samples_before_the_end_of_training_are_counted() -> None:
    (result,) = check_overlap(_times(train=5, validation=15, test=10), {}, Prepare(time_column="day"))
    assert (result.level, result.value) == ("error", 4.0)
    assert "test.day: 4 of 10 samples are earlier than the newest training sample (14)" in result.sentence()


def test_groups_that_training_has_too_stop_unless_they_are_accepted(check: Check) -> None:
    def sides(first: int, large: int = 0) -> list[dict[str, Any]]:
        people = (np.arange(300) // 10, np.arange(300, 400) // 10, first + np.arange(100) // 10)
        x = np.split(normal(500, 4), [300, 400])
        columns = [{"x": rows, "person": ids + large} for rows, ids in zip(x, people, strict=True)]
        return [columns[0], columns[2], columns[1]]

    settings = {"inputs": ["x"], "group_column": "person"}
    assert alarms(check(*sides(first=40), **settings)) == []
    assert alarms(check(*sides(first=40, large=1 << 60), **settings)) == [], "ids are compared exactly"
    (found,) = alarms_of(check(*sides(first=27), **settings), "group")
    assert (found.where, found.level, found.value) == ("test.person", "error", 3.0)
    assert "3 of 10 groups are also in train, such as 27, with 30 of 100 samples" in found.detail
    (found,) = alarms_of(check(*sides(first=27), overlap="warn", **settings), "group")
    assert found.level == "warn"
    assert alarms_of(check(*sides(first=27), inputs=["x"]), "group") == []


def test_an_unknown_column_is_an_error_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"data\('train'\) has no column week \(x, day\)"):
        read_column(Samples("train", {"x": np.zeros(3), "day": np.arange(3)}), "time_column", "week")


def _series(days: slice, trend: float, change: float = 0.0) -> dict[str, Any]:
    """Return days of twelve series with a season, a trend, and a change of level after day 600."""
    day = np.arange(1000)
    noise = np.random.default_rng(0).standard_normal((12, 1000))
    x = np.sin(2 * np.pi * day / 7) + trend * day / 1000 + 3 * (np.arange(12) % 3)[:, None] + noise
    x += change * (day >= 600)
    chosen = day[days].tolist()
    rows = np.stack([x[:, d - 3 : d].ravel() for d in chosen]).reshape(len(chosen) * 12, 3)
    return {"x": rows.astype(np.float32), "y": x[:, chosen].T.ravel(), "day": np.repeat(chosen, 12).astype(float)}


def _check_by_time(check: Check, trend: float, change: float = 0.0, **settings: Any) -> list[CheckResult]:
    train, validation, test = (
        _series(days, trend, change) for days in (slice(3, 600), slice(600, 700), slice(700, 900))
    )
    found = check(train, test, validation, inputs=["x"], copies="off", **settings)
    return [result for result in found.results if result.level != "ok"]


@pytest.mark.parametrize("trend", [0.0, 4.0, 40.0])
def test_a_trend_is_no_drift_where_splits_are_by_time(check: Check, trend: float) -> None:
    assert _check_by_time(check, trend, time_column="day") == []
    without = {result.where.split("[")[0] for result in _check_by_time(check, trend)}
    assert without >= ({"test.x", "test.y"} if trend else {"test.day"})


@pytest.mark.parametrize("trend", [0.0, 4.0])
def test_a_break_after_training_is_drift_also_where_splits_are_by_time(check: Check, trend: float) -> None:
    found = _check_by_time(check, trend, change=8.0, time_column="day")
    assert {result.where for result in found} >= {"validation.x", "test.x", "validation.y", "test.y"}
    drift = [result.detail for result in found if result.check in ("drift", "labels")]
    assert all(
        "than in train" in detail and "twice what time explains, by the drift within train" in detail
        for detail in drift
    )
    assert not any("at random" in result.detail for result in found)


def test_a_range_that_changes_after_training_is_reported_where_splits_are_by_time(check: Check) -> None:
    found = _check_by_time(check, trend=0.0, change=100.0, time_column="day")
    assert {result.check for result in found} == {"range", "drift", "labels"}
