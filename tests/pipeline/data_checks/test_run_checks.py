from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.contract.config import Config, override_config
from pipeline.contract.registry import CHAMPION, Entry, Registry, Wanted, change_registry, read_registry
from pipeline.contract.run import Run, StepRecord
from pipeline.data_checks.champion import NONE, PART, entry_of, gone, rival
from pipeline.data_checks.run_checks import write_look
from pipeline.history import Project
from pipeline.plan import parts_of

from .conftest import LookAt, alarms, new_run, normal, told

TRAIN = {"x": normal(300, 4), "label": np.arange(300) % 3}
TEST = {"x": normal(120, 4, seed=1), "label": np.arange(120) % 3}


def crowned(runs: Path, name: str, parts: Mapping[str, str]) -> Run:
    """A run that was prepared from these parts, then deployed."""
    run = new_run(runs.parent, name)
    record = StepRecord(step="prepare", status="done", key="k", parts=parts)
    body = run.read().model_copy(update={"steps": {"prepare": record}})
    (run.path / "run.json").write_text(body.model_dump_json())
    change_registry(runs, "", lambda _: Wanted(CHAMPION, entry(name), "deployed"))
    return run


def entry(name: str) -> Entry:
    return Entry(bundle=f"bundle of {name}", checkpoint=f"of {name}", path=f"{name}/export/bundle")


def name_of(found: Entry | None) -> str | None:
    return found.bundle.removeprefix("bundle of ") if found else None


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def test_data_is_held_against_the_newest_champion_of_other_data(runs: Path) -> None:
    def found(data: str) -> str | None:
        return name_of(rival(read_registry(runs, ""), runs, {"data": data}))

    assert found("old") is None
    crowned(runs, "a", {"data": "old", PART: NONE})
    assert (found("old"), found("new")) == (None, "a")
    crowned(runs, "b", {"data": "new", PART: "bundle of a"})
    assert (found("old"), found("new")) == ("b", "a"), "of its own data a run is told nothing new"
    crowned(runs, "c", {"data": "new", PART: "bundle of a"})
    assert found("new") == "a"
    shutil.rmtree(runs / "a")
    assert found("new") is None, "what is gone has nothing to compare"


def test_a_champion_changes_the_key_of_other_data_and_leaves_its_own(
    config: Config, project: Project, runs: Path
) -> None:
    before = parts_of("prepare", config, project, {})
    assert before[PART] == NONE
    crowned(runs, "mine", before)
    assert parts_of("prepare", config, project, {}) == before, "an unchanged rerun reuses what it has"
    other = override_config(config, ["prepare.near=off"])
    theirs = parts_of("prepare", other, project, {})
    assert theirs[PART] == "bundle of mine"
    crowned(runs, "theirs", theirs)
    assert parts_of("prepare", other, project, {}) == theirs


def test_a_step_compares_with_the_champion_its_key_names(runs: Path) -> None:
    crowned(runs, "a", {"data": "old"})
    run = new_run(runs.parent, "mine")
    record = StepRecord(step="prepare", status="running", key="k", parts={"data": "new", PART: "bundle of a"})
    (run.path / "run.json").write_text(run.read().model_copy(update={"steps": {"prepare": record}}).model_dump_json())
    crowned(runs, "b", {"data": "newer"})
    assert name_of(entry_of(read_registry(runs, ""), runs, run)) == "a"
    assert name_of(entry_of(read_registry(runs, ""), runs, new_run(runs.parent, "without"))) == "b"


def look_beside(runs: Path, look_at: LookAt, train: Any, **words: Any) -> Any:
    """The champion learned from TRAIN, before there was a registry; the test split here is a part of ours."""
    before = look_at(TRAIN, TEST, classes="abc")
    champion = crowned(runs, "champion", {"data": "old"})
    champion.output("prepare").mkdir()
    write_look(before, champion.output("prepare"))
    test = {name: column[:120] for name, column in train.items()}
    return look_at(train, test, **{"classes": "abc", **words})


def test_the_same_kind_of_data_passes(runs: Path, look_at: LookAt, tmp_path: Path) -> None:
    found = look_beside(runs, look_at, {"x": normal(400, 4, seed=7), "label": np.arange(400) % 3})
    assert alarms(found) == []
    assert {one.check for one in found.findings if one.against == "champion"} == {"schema", "range", "drift", "labels"}
    write_look(found, tmp_path)
    body = json.loads((tmp_path / "checks.json").read_text())
    assert body["champion"] == {"bundle": "bundle of champion", "run": "champion"}


def test_data_that_drifted_since_is_told_by_feature(runs: Path, look_at: LookAt) -> None:
    x = normal(400, 4, seed=7) + np.array([0, 1.5, 0, 0], np.float32)
    found = look_beside(runs, look_at, {"x": x, "label": np.zeros(400, np.int64)}, drift="error")
    (drifted,) = [one for one in told(found, "drift") if one.against == "champion"]
    assert (drifted.where, drifted.level) == ("train.x[1]", "error")
    assert drifted.detail.startswith("other values since the champion was trained (KS distance")
    assert [one.where for one in told(found, "labels") if one.against == "champion"] == ["train.class label"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": normal(400, 4).astype(np.float64)}, "type float64, not float32 as the champion was trained on"),
        ({"x": normal(400, 4), "more": normal(400)}, "the champion's data has no such input"),
    ],
)
def test_other_columns_than_the_champions_stop_the_road(runs: Path, look_at: LookAt, change: Any, message: str) -> None:
    found = look_beside(runs, look_at, {**change, "label": np.arange(400) % 3})
    (finding,) = told(found, "schema")
    assert finding.level == "error"
    assert message in finding.detail
    assert "set prepare.columns=warn" in finding.detail


def test_other_classes_than_the_champions_stop_the_road(runs: Path, look_at: LookAt) -> None:
    (finding,) = told(look_beside(runs, look_at, TRAIN, classes="acb"), "schema")
    assert "another order: every index means another class" in finding.detail


def test_a_champion_that_is_gone_or_of_an_older_version_is_a_sentence(runs: Path, look_at: LookAt) -> None:
    crown = crowned(runs, "champion", {"data": "old"})
    assert any("has no prepare/profile.json" in note for note in look_at(TRAIN, TEST, classes="abc").notes)
    shutil.rmtree(crown.path)
    registry = read_registry(runs, "")
    assert gone(registry, runs) in look_at(TRAIN, TEST, classes="abc").notes
    assert "the champion's run champion is not here" in gone(registry, runs)
    assert gone(Registry(), runs) == ""
