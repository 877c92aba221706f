from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.spec.bundle import open_bundle
from serve.loading import prove
from tests.serve.odd import mixing, slow


def test_requests_of_a_model_that_mixes_rows_run_alone_and_it_is_said_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    predictor = prove(open_bundle(mixing(tmp_path / "bundle")), "cpu", 1)
    assert "answered otherwise in company than alone: y" in predictor.why_alone
    assert "batching=off reason='a golden request" in caplog.text


def test_requests_of_a_model_that_does_not_are_merged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    predictor = prove(open_bundle(slow(tmp_path / "bundle")), "cpu", 1)
    assert predictor.why_alone == ""
    assert "batching" not in caplog.text
    np.testing.assert_array_equal(predictor.run({"x": np.ones((1, 1), np.float32)})["y"], [[2]])
