from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from pipeline.spec.bundle import Bundle, open_bundle
from pipeline.spec.errors import BundleError
from serve.runtime.selfcheck import check, tensor_difference
from serve.runtime.session import Session


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
