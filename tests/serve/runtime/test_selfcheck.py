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
from pipeline.contract.errors import BundleError
from pipeline.contract.golden import Golden
from serve.runtime.selfcheck import check, strangers, tensor_difference, why_not_merged
from serve.runtime.session import Session

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Array]


def golden(rows: int = 3) -> Golden:
    x = np.random.default_rng(1).random((rows, 4)).astype(np.float32)
    ids = np.arange(rows * 4, dtype=np.int64).reshape(rows, 4)
    return Golden({"x": x, "ids": ids}, {}, [], [], rtol=1e-4, atol=1e-5)


def honest(arrays: Arrays) -> Arrays:
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
def test_a_model_that_answers_each_row_by_itself_may_be_merged(rows: int, most: int) -> None:
    sizes = []

    def noted(arrays: Arrays) -> Arrays:
        sizes.append(len(arrays["x"]))
        return honest(arrays)

    assert why_not_merged(golden(rows), noted, most) == ""
    assert max(sizes) <= most


@pytest.mark.parametrize(
    ("model", "rows"),
    [
        *((model, rows) for model in (normalising, sharing, counting, pooled) for rows in (1, 3)),
        (attending, 3),  # with one row there are only its own whole numbers, in another order
    ],
)
def test_a_model_whose_rows_touch_each_other_may_not(model: Callable[[Arrays], Arrays], rows: int) -> None:
    assert "answered otherwise in company than alone: y" in why_not_merged(golden(rows), model, 32)


def test_small_differences_as_other_batch_sizes_make_are_no_reason() -> None:
    def rounded(arrays: Arrays) -> Arrays:
        return {"y": honest(arrays)["y"] * np.float32(1 + 1e-6 * len(arrays["x"]))}

    assert why_not_merged(golden(), rounded, 32) == ""


def test_a_model_that_runs_one_row_only_may_not_be_merged() -> None:
    def single(arrays: Arrays) -> Arrays:
        if len(arrays["x"]) > 1:
            raise RuntimeError("Got invalid dimensions")
        return honest(arrays)

    assert "Got invalid dimensions" in why_not_merged(golden(), single, 32)


def test_a_model_that_refuses_strange_values_is_judged_by_those_it_knows() -> None:
    known = golden()

    def choosy(arrays: Arrays) -> Arrays:
        if not np.isin(arrays["x"], known.inputs["x"]).all():
            raise ValueError("never seen such a number")
        return honest(arrays)

    assert why_not_merged(known, choosy, 32) == ""


def test_who_wants_no_merging_is_not_asked() -> None:
    def never(_: Arrays) -> Arrays:
        raise AssertionError

    assert why_not_merged(golden(), never, 1) == "serve.batch_rows is 1"


def test_strangers_are_of_the_same_types_and_unlike_the_rows_they_come_from() -> None:
    rows = golden().inputs
    found = strangers(rows)
    assert {name: (one.dtype, one.shape) for name, one in found.items()} == {
        name: (one.dtype, one.shape) for name, one in rows.items()
    }
    assert not any((found[name] == rows[name]).all() for name in rows)
    assert sorted(found["ids"][0]) == sorted(rows["ids"][0])


def _check(path: Path) -> None:
    bundle = open_bundle(path)
    check(bundle, Session(bundle, "cpu", 1))


def test_a_bundle_that_answers_as_at_export_passes_and_stays_as_it_was(bundle: Bundle) -> None:
    check(bundle, Session(bundle, "cpu", 1))
    assert not (bundle.path / "__pycache__").exists()
    open_bundle(bundle.path)


def test_weights_changed_under_a_new_seal_are_found_out(own_bundle: Path, seal: Callable[[Path], str]) -> None:
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


def test_a_changed_prediction_is_named(own_bundle: Path, seal: Callable[[Path], str]) -> None:
    golden = json.loads((own_bundle / "golden.json").read_text())
    golden["predictions"][1]["digit"] += 1
    (own_bundle / "golden.json").write_text(json.dumps(golden))
    seal(own_bundle)
    with pytest.raises(BundleError, match=r"predictions\[1\]\.digit: expected"):
        _check(own_bundle)


def test_a_codec_that_fails_on_its_own_golden_requests_is_a_bundle_error(
    own_bundle: Path, seal: Callable[[Path], str]
) -> None:
    codec = own_bundle / "codec.py"
    codec.write_text(codec.read_text().replace('outputs["logits"]', 'outputs["scores"]'))
    seal(own_bundle)
    with pytest.raises(BundleError, match="golden requests failed: KeyError: 'scores'"):
        _check(own_bundle)


def test_tensors_part_where_they_first_differ() -> None:
    wanted = np.array([[1.0, np.nan], [2.0, 3.0]], np.float32)
    assert tensor_difference({"y": wanted}, {"y": wanted * np.float32(1.00001)}, rtol=1e-3, atol=0) == ""
    found = wanted + np.array([[0, 0], [0, 1]], np.float32)
    assert tensor_difference({"y": wanted}, {"y": found}, 1e-3, 0) == "y[1, 1]: expected 3.0, found 4.0 (1 such)"
    assert "expected float32" in tensor_difference({"y": wanted}, {"y": wanted.astype(np.float64)}, 1, 1)
    assert tensor_difference({"y": wanted}, {}, 1, 1) == "outputs are , expected y"
    labels = np.array([1, 2])
    assert tensor_difference({"y": labels}, {"y": labels + 1}, 10, 10).startswith("y[0]: expected 1, found 2")
