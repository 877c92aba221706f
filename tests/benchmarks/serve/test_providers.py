from __future__ import annotations

import pytest

from benchmarks.serve.providers import SETUPS, measure, text
from benchmarks.serve.workloads import WORKLOADS


def test_each_provider_has_its_times_or_the_reason() -> None:
    rows = measure(WORKLOADS["digits"], 0.01)
    assert [row.title for row in rows] == [title for title, *_ in SETUPS]
    assert all(row.failed or (len(row.run_ms) == 3 and min(row.run_ms) > 0) for row in rows)
    assert not rows[0].failed
    assert text(rows).count("\n") == 1 + len(SETUPS)


@pytest.mark.gpu
def test_cuda_is_measured_on_a_gpu() -> None:
    rows = measure(WORKLOADS["conv"], 1.0)
    if rows[1].failed:
        pytest.skip(rows[1].failed)
    print(text(rows))
    assert not rows[2].failed
