"""The throughput of the bare runtime, with which all contenders are compared."""

from __future__ import annotations

from pathlib import Path

from benchmarks.serve import raw
from benchmarks.serve.workloads import WORKLOADS


def test_limit_is_the_fastest_batch_size(tmp_path: Path) -> None:
    WORKLOADS["digits"].build(tmp_path / "net.onnx")
    found = raw.best(tmp_path / "net.onnx", 1, 0.05, [1, 32])
    assert found.rows == 32, "next to nothing is computed, so that a call's own cost is shared by its rows"
    assert found.per_second > 10_000
    assert found.run_ms * found.per_second / 1e3 / found.rows < 1.01
    assert 0 < found.cpu_us < 1e3
