from __future__ import annotations

import pytest
import torch

from bench.train.gpt2 import flops_per_token, peak_flops, sequences
from bench.train.gpu import gpu, text


@pytest.mark.gpu
def test_gpt2_trains_on_every_gpu_and_its_speed_is_told() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    rows = gpu(quick=True)["rows"]
    assert [row["gpus"] for row in rows] == sorted({1, torch.cuda.device_count()})
    assert all(row["tokens_per_second"] > 0 and (row["mfu"] is None or 0 < row["mfu"] < 1) for row in rows)


def test_without_a_gpu_the_table_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert text(gpu(quick=True)) == "GPT-2 on a GPU skipped: torch sees no CUDA device"


def test_a_device_has_the_peak_of_the_longest_name_that_fits() -> None:
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("Some Other Card") is None


def test_the_batch_and_the_work_follow_from_memory_and_size() -> None:
    assert [sequences(gigabytes << 30) for gigabytes in (140, 48, 24, 8)] == [32, 16, 8, 4]
    assert flops_per_token(124_000_000) == pytest.approx(857e6, rel=0.01)
