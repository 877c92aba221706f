from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.contract.bundle import Bundle, open_bundle
from pipeline.system.errors import BundleError
from serve.runtime.loading import batch_sizes, load_predictor, warm_up
from serve.runtime.predictor import Predictor
from tests.serve.special_models import mixing, slow


def test_model_that_mixes_rows_is_not_batched_and_the_reason_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    predictor = load_predictor(open_bundle(mixing(tmp_path / "bundle")), "cpu", 1)
    assert "gets another answer in a batch than alone: y" in predictor.unbatched_reason
    assert "batching=off reason='a golden request" in caplog.text


def test_model_with_independent_rows_is_batched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    predictor = load_predictor(open_bundle(slow(tmp_path / "bundle")), "cpu", 1)
    assert predictor.unbatched_reason == ""
    assert "batching" not in caplog.text
    np.testing.assert_array_equal(predictor.run({"x": np.ones((1, 1), np.float32)})["y"], [[2]])


@pytest.mark.parametrize(("rows", "sizes"), [(2, [1, 2]), (32, [1, 2, 4, 8, 16, 32]), (24, [1, 2, 4, 8, 16, 24])])
def test_warm_up_runs_batch_sizes_up_to_the_largest(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, rows: int, sizes: list[int]
) -> None:
    runtime = bundle.signature.runtime.model_copy(update={"batch_rows": rows})
    small = replace(bundle, signature=bundle.signature.model_copy(update={"runtime": runtime}))
    ran: list[int] = []
    run = Predictor.run

    def noted(self: Predictor, arrays: Any, outputs: Any = None) -> Any:
        ran.append(len(arrays["image"]))
        return run(self, arrays, outputs)

    predictor = load_predictor(small, "cpu", 1)
    monkeypatch.setattr(Predictor, "run", noted)
    warm_up(small, predictor)
    assert ran == sizes == batch_sizes(small.signature)


def test_model_without_a_batch_axis_has_no_batch_sizes(bundle: Bundle) -> None:
    fixed = tuple(spec.model_copy(update={"shape": (1, 10)}) for spec in bundle.signature.outputs)
    assert batch_sizes(bundle.signature.model_copy(update={"outputs": fixed})) == []


def test_a_size_the_model_cannot_run_stops_the_start(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = load_predictor(bundle, "cpu", 1)

    def narrow(arrays: Any, outputs: Any = None) -> Any:
        if len(arrays["image"]) > 4:
            raise RuntimeError("Reshape: 4 rows\nand no more")
        return {}

    monkeypatch.setattr(predictor, "run", narrow)
    with pytest.raises(BundleError, match=r"cannot run a batch of 8, .*: Reshape: 4 rows and no more; to fix it: set"):
        warm_up(bundle, predictor)
