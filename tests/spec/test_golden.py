from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.spec.golden import Golden, difference

RTOL, ATOL = 1e-3, 1e-4


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        (1.0, 1.0005),
        (0.0, 0.00005),
        (3, 3.0),
        ("cat", "cat"),
        (None, None),
        (True, True),
        ([1.0, [2.0]], [1.0005, [2.0]]),
        ({"a": 1.0, "b": []}, {"b": [], "a": 1.0}),
        ([], []),
    ],
)
def test_answers_within_tolerance_agree(expected: Any, found: Any) -> None:
    assert difference(expected, found, RTOL, ATOL) is None


@pytest.mark.parametrize(
    ("expected", "found", "place"),
    [
        (1.0, 1.01, "answer"),
        (1.0, float("nan"), "answer"),
        (1.0, float("inf"), "answer"),
        (1, True, "answer"),
        (True, 1, "answer"),
        (1.0, "1.0", "answer"),
        (1.0, None, "answer"),
        ("cat", "dog", "answer"),
        ([1.0], 1.0, "answer"),
        ([1.0, 2.0], [1.0], "answer"),
        ([1.0, 2.0], [1.0, 3.0], "[1]"),
        ({"a": 1.0}, {"a": 1.0, "b": 2.0}, "answer"),
        ({"a": {"b": [0.0, 5.0]}}, {"a": {"b": [0.0, 6.0]}}, "a.b[1]"),
        ([{"digit": 3}], [{"digit": 4}], "[0].digit"),
    ],
)
def test_answers_that_part_say_where(expected: Any, found: Any, place: str) -> None:
    text = difference(expected, found, RTOL, ATOL)
    assert text is not None
    assert text.startswith(f"{place}: expected")


def test_the_place_starts_with_what_the_caller_looks_at() -> None:
    assert str(difference([[1.0]], [[2.0]], RTOL, ATOL, "predictions")).startswith("predictions[0][0]: ")


def test_golden_requests_keep_every_type_and_value(tmp_path: Path) -> None:
    inputs = {
        "ids": np.array([[1, -(2**62)]]),
        "mask": np.array([[True, False]]),
        "x": np.array([[np.inf]], np.float16),
    }
    Golden(inputs, {"y": np.array([[np.nan]])}, ["é"], [1.25], 0.1, 0.2).write(tmp_path)
    found = Golden.read(tmp_path)
    for name, array in inputs.items():
        assert found.inputs[name].dtype == array.dtype
        assert np.array_equal(found.inputs[name], array)
    assert np.isnan(found.outputs["y"]).all()
    assert (found.instances, found.predictions, found.rtol, found.atol) == (["é"], [1.25], 0.1, 0.2)


def test_golden_texts_come_back_as_texts(tmp_path: Path) -> None:
    texts = np.array([["héllo", ""]], np.object_)
    Golden({"x": texts}, {}, [], [], 0.0, 0.0).write(tmp_path)
    found = Golden.read(tmp_path).inputs["x"]
    assert found.dtype == np.object_
    assert found.tolist() == texts.tolist()


def test_arrays_that_need_pickle_are_not_read(tmp_path: Path) -> None:
    Golden({}, {}, [], [], 0.0, 0.0).write(tmp_path)
    arrays: dict[str, Any] = {"input.x": np.array([{"code": "runs"}], dtype=object)}
    np.savez(tmp_path / "golden.npz", **arrays)
    with pytest.raises(ValueError, match="allow_pickle"):
        Golden.read(tmp_path)


def test_the_same_golden_requests_are_the_same_bytes(tmp_path: Path) -> None:
    golden = Golden({"x": np.ones((2, 2))}, {"y": np.zeros(2)}, [], [], 0.0, 0.0)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        golden.write(tmp_path / name)
    assert (tmp_path / "a" / "golden.npz").read_bytes() == (tmp_path / "b" / "golden.npz").read_bytes()
    assert json.loads((tmp_path / "a" / "golden.json").read_text())["instances"] == []
