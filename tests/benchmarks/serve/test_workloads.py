"""The nets of the benchmarks have their stated sizes, and their bundles can be served."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from benchmarks.serve.workloads import WORKLOADS, Workload
from pipeline.contract.bundle import open_bundle


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=list(WORKLOADS))
@pytest.mark.long
def test_a_bundle_is_sealed_and_answers_each_row_by_itself(workload: Workload, tmp_path: Path) -> None:
    bundle = open_bundle(workload.bundle(tmp_path / "bundle"))
    golden = bundle.golden()
    session = onnxruntime.InferenceSession(str(bundle.model), providers=["CPUExecutionProvider"])
    twice = session.run(["logits"], {"x": np.concatenate([workload.request] * 2)})[0]
    assert np.allclose(twice, np.concatenate([golden.outputs["logits"]] * 2), rtol=1e-3, atol=1e-3)
    assert np.isfinite(twice).all()


@pytest.mark.long
def test_the_conv_net_has_the_size_of_resnet_18(tmp_path: Path) -> None:
    WORKLOADS["conv"].build(tmp_path / "net.onnx")
    weights = onnx.load(tmp_path / "net.onnx").graph.initializer
    assert 11e6 < sum(int(np.prod(one.dims)) for one in weights) < 12e6
