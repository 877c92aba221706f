from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from pipeline.contract.bundle import Bundle, open_bundle
from pipeline.contract.golden import Golden
from pipeline.system.errors import BundleError
from serve.runtime.selfcheck import check_golden_requests, merging_problem, other_rows, tensor_difference
from serve.runtime.session import Session

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Array]


def golden(rows: int = 3) -> Golden:
    x = np.random.default_rng(1).random((rows, 4)).astype(np.float32)
    ids = np.arange(rows * 4, dtype=np.int64).reshape(rows, 4)
    return Golden({"x": x, "ids": ids}, {}, [], [], rtol=1e-4, atol=1e-5)


def independent(arrays: Arrays) -> Arrays:
    return {"y": arrays["x"] * 2 + arrays["ids"]}


def normalising(arrays: Arrays) -> Arrays:
    return {"y": arrays["x"] - arrays["x"].mean(axis=0)}


def sharing(arrays: Arrays) -> Arrays:
    return {"y": np.exp(arrays["x"]) / np.exp(arrays["x"]).sum(axis=0)}


def attending(arrays: Arrays) -> Arrays:
    return {"y": arrays["ids"] - arrays["ids"].max()}


def counting(arrays: Arrays) -> Arrays:
    return {"y": np.arange(len(arrays["x"]), dtype=np.float32)}


def pooled(arrays: Arrays) -> Arrays:
    return {"y": arrays["x"].sum(axis=0, keepdims=True)}


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("most", [2, 3, 32])
def test_independent_rows_may_be_merged(rows: int, most: int) -> None:
    sizes = []

    def noted(arrays: Arrays) -> Arrays:
        sizes.append(len(arrays["x"]))
        return independent(arrays)

    assert merging_problem(golden(rows), noted, most) == ""
    assert max(sizes) <= most


@pytest.mark.parametrize(
    ("model", "rows"),
    [
        *((model, rows) for model in (normalising, sharing, counting, pooled) for rows in (1, 3)),
        (attending, 3),  # with one row the other rows have the same integers in another order
    ],
)
def test_dependent_rows_may_not_be_merged(model: Callable[[Arrays], Arrays], rows: int) -> None:
    assert "gets another answer in a batch than alone: y" in merging_problem(golden(rows), model, 32)


def test_rounding_differences_do_not_prevent_merging() -> None:
    def rounded(arrays: Arrays) -> Arrays:
        return {"y": independent(arrays)["y"] * np.float32(1 + 1e-6 * len(arrays["x"]))}

    assert merging_problem(golden(), rounded, 32) == ""


def test_model_for_single_rows_may_not_be_merged() -> None:
    def single(arrays: Arrays) -> Arrays:
        if len(arrays["x"]) > 1:
            raise RuntimeError("Got invalid dimensions")
        return independent(arrays)

    assert "Got invalid dimensions" in merging_problem(golden(), single, 32)


def test_model_that_rejects_made_up_values_may_be_merged() -> None:
    known = golden()

    def selective(arrays: Arrays) -> Arrays:
        if not np.isin(arrays["x"], known.inputs["x"]).all():
            raise ValueError("unknown number")
        return independent(arrays)

    assert merging_problem(known, selective, 32) == ""


def test_batch_of_one_row_skips_the_check() -> None:
    def never(_: Arrays) -> Arrays:
        raise AssertionError

    assert merging_problem(golden(), never, 1) == "serve.batch_rows is 1"


def test_other_rows_have_equal_types_and_different_values() -> None:
    rows = golden().inputs
    found = other_rows(rows)
    assert {name: (one.dtype, one.shape) for name, one in found.items()} == {
        name: (one.dtype, one.shape) for name, one in rows.items()
    }
    assert not any((found[name] == rows[name]).all() for name in rows)
    assert sorted(found["ids"][0]) == sorted(rows["ids"][0])


def _check(path: Path) -> None:
    bundle = open_bundle(path)
    check_golden_requests(bundle, Session(bundle, "cpu", 1))


def test_valid_bundle_passes_and_stays_unchanged(bundle: Bundle) -> None:
    check_golden_requests(bundle, Session(bundle, "cpu", 1))
    assert not (bundle.path / "__pycache__").exists()
    open_bundle(bundle.path)


def test_changed_weights_are_detected(own_bundle: Path, seal: Callable[[Path], str]) -> None:
    model = onnx.load(str(own_bundle / "model.onnx"))
    weight = numpy_helper.to_array(model.graph.initializer[0]).copy()
    weight[0, 0] += 1
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(weight, "weight"))
    onnx.save(model, str(own_bundle / "model.onnx"))
    seal(own_bundle)
    with pytest.raises(
        BundleError, match=r"golden requests: logits\[0, 0\]: expected .*, found .*; the model does not"
    ):
        _check(own_bundle)


def test_changed_prediction_is_named(own_bundle: Path, seal: Callable[[Path], str]) -> None:
    golden = json.loads((own_bundle / "golden.json").read_text())
    golden["predictions"][1]["digit"] += 1
    (own_bundle / "golden.json").write_text(json.dumps(golden))
    seal(own_bundle)
    with pytest.raises(BundleError, match=r"predictions\[1\]\.digit: expected"):
        _check(own_bundle)


def test_codec_failing_on_golden_requests_is_a_bundle_error(own_bundle: Path, seal: Callable[[Path], str]) -> None:
    codec = own_bundle / "codec.py"
    codec.write_text(codec.read_text().replace('outputs["logits"]', 'outputs["scores"]'))
    seal(own_bundle)
    with pytest.raises(BundleError, match="golden requests failed: KeyError: 'scores'"):
        _check(own_bundle)


def test_tensor_difference_names_the_first_element() -> None:
    wanted = np.array([[1.0, np.nan], [2.0, 3.0]], np.float32)
    assert tensor_difference({"y": wanted}, {"y": wanted * np.float32(1.00001)}, rtol=1e-3, atol=0) == ""
    found = wanted + np.array([[0, 0], [0, 1]], np.float32)
    assert tensor_difference({"y": wanted}, {"y": found}, 1e-3, 0) == "y[1, 1]: expected 3.0, found 4.0 (1 differ)"
    assert "expected float32" in tensor_difference({"y": wanted}, {"y": wanted.astype(np.float64)}, 1, 1)
    assert tensor_difference({"y": wanted}, {}, 1, 1) == "outputs are , expected y"
    labels = np.array([1, 2])
    assert tensor_difference({"y": labels}, {"y": labels + 1}, 10, 10).startswith("y[0]: expected 1, found 2")
