from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.checks.look import tell, write_look
from pipeline.spec.errors import DataError

from .conftest import LookAt, alarms, normal, told

GOOD = {"x": normal(300, 4), "label": np.arange(300) % 3}
FEWER = {"x": normal(120, 4, seed=1), "label": np.arange(120) % 3}


def test_good_data_pass_every_check_and_each_says_so(look_at: LookAt) -> None:
    found = look_at(GOOD, FEWER, classes="abc")
    assert alarms(found) == []
    assert {one.check for one in found.findings} == {"schema", "missing", "range", "drift", "labels"}
    tell(found)


@pytest.mark.parametrize(
    ("x", "told_of_it"),
    [
        (FEWER["x"].astype(np.float64), "type float64, not float32"),
        (normal(120, 5), "shape [5] of a sample, not [4]"),
        (normal(120, 4, 1), "shape [4, 1] of a sample, not [4]"),
    ],
)
def test_splits_of_another_type_or_shape_stop_the_road(look_at: LookAt, x: Any, told_of_it: str) -> None:
    found = look_at(GOOD, {**FEWER, "x": x}, validation=FEWER, classes="abc")
    assert [one.sentence() for one in told(found, "schema")] == [
        f"test.x: {told_of_it} as in train.x; make data() give both alike"
    ]
    with pytest.raises(DataError, match=r"data: test\.x: "):
        tell(found)


def gap(share: float) -> Any:
    x = normal(200, 4)
    x.reshape(-1)[: int(share * x.size)] = np.nan
    return {"x": x, "label": np.arange(200) % 3}


def test_a_missing_number_stops_the_road_and_says_how_many_and_how_to_mend_it(look_at: LookAt) -> None:
    found = look_at(gap(0.01), FEWER, classes="abc")
    (finding,) = told(found, "missing")
    assert finding.where == "train.x[3]"
    assert finding.detail.startswith("1% of the numbers are NaN or infinite (8 of 800 in x); fill or drop them")
    assert "prepare.missing_share=0.01" in finding.detail
    assert told(look_at(gap(0.01), FEWER, classes="abc", missing_share=0.01), "missing") == []
    assert told(look_at(gap(0.01), FEWER, classes="abc", missing=False), "missing") == [], "YAML reads `off` as false"


def test_a_column_with_nothing_in_it_is_named_as_such(look_at: LookAt) -> None:
    empty = {"x": np.full((50, 4), np.nan, np.float32), "label": np.arange(50) % 3}
    (finding,) = told(look_at(GOOD, empty, validation=FEWER, classes="abc"), "missing")
    assert finding.detail.startswith("every number is NaN or infinite")


def test_one_number_of_many_that_is_always_missing_is_no_small_part(look_at: LookAt) -> None:
    x = normal(50, 100)
    x[:, 7] = np.nan
    (finding,) = told(look_at({"x": normal(300, 100)}, {"x": x}, {"x": normal(90, 100)}, missing_share=0.05), "missing")
    assert (finding.where, finding.value) == ("test.x[7]", 1.0)


def test_another_scale_is_another_range_both_ways_and_an_outlier_is_none(look_at: LookAt) -> None:
    pixels = np.abs(normal(300, 1))
    (larger,) = told(look_at({"x": pixels}, {"x": pixels[:120] * 255}, validation={"x": pixels[120:]}), "range")
    assert larger.where == "test.x"
    assert "look for another unit, scale or encoding" in larger.detail
    assert told(look_at({"x": pixels * 255}, {"x": pixels[:120]}, leaks="warn"), "range")
    outlier = pixels[:120].copy()
    outlier[0] = 1e9
    assert told(look_at({"x": pixels}, {"x": outlier}), "range") == []


def test_other_labels_are_told_by_the_class_that_moved(look_at: LookAt) -> None:
    skewed = {**FEWER, "label": np.where(np.arange(120) % 4 == 0, 2, 0)}
    (finding,) = told(look_at(GOOD, skewed, validation=FEWER, classes=("cat", "dog", "owl")), "labels")
    assert finding.where == "test.class label"
    assert "other labels than in train (" in finding.detail
    assert "dog: 33.33% → 0.00%" in finding.detail or "cat: 33.33% → 75.00%" in finding.detail
    assert "prepare.labels=off" in finding.detail


def test_what_a_task_without_classes_learns_is_its_label(look_at: LookAt) -> None:
    train = {"x": normal(300, 4), "target": normal(300)}
    test = {"x": normal(120, 4, seed=1), "target": normal(120) + 3}
    found = look_at(train, test, inputs=["x"])
    assert {one.where for one in told(found, "labels")} == {"validation.target", "test.target"}
    assert told(found, "drift") == []


def test_other_inputs_are_told_feature_by_feature(look_at: LookAt) -> None:
    shifted = FEWER["x"] + np.array([0, 0, 2, 0], np.float32)
    found = look_at(GOOD, {**FEWER, "x": shifted}, validation=FEWER, classes="abc")
    assert [one.where for one in told(found, "drift")] == ["test.x[2]"]
    assert told(look_at(GOOD, {**FEWER, "x": shifted}, classes="abc", drift="off"), "drift") == []
    strict = look_at(GOOD, {**FEWER, "x": shifted}, validation=FEWER, classes="abc", drift="error")
    with pytest.raises(DataError, match=r"data: test\.x\[2\]: other values than in train"):
        tell(strict)


def test_an_ignored_column_is_not_looked_at(look_at: LookAt) -> None:
    test = {**FEWER, "x": np.full((120, 4), np.nan)}
    assert alarms(look_at(GOOD, test, validation=FEWER, classes="abc", ignore=["x"])) == []


def test_all_that_was_found_is_written_and_the_first_few_are_printed(
    look_at: LookAt, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    many = {f"c{i}": normal(200, seed=i) for i in range(9)}
    found = look_at(many, {name: column[:90] + 3 for name, column in many.items()}, range="off")
    write_look(found, tmp_path)
    rows = json.loads((tmp_path / "checks.json").read_text())["checks"]
    assert len([row for row in rows if row["level"] == "warn"]) == 18
    assert {frozenset(row) for row in rows} == {
        frozenset({"check", "where", "level", "value", "limit", "detail", "against"})
    }
    tell(found)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 6
    assert lines[-1] == "warning: 13 more of the kind, in prepare/checks.json"


def test_a_feature_that_never_changes_is_told_in_passing(look_at: LookAt) -> None:
    x = normal(100, 4)
    x[:, 1] = 2
    found = look_at({"x": x[:60]}, {"x": x[60:]})
    assert "the same in all samples of train: x[1]" in found.notes
    assert alarms(found) == []
