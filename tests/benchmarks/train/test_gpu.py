from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.train.gpu import gpu, line, text
from benchmarks.train.large import NETS, Gpt2, HiddenInTraining, sequences


@pytest.mark.gpu
@pytest.mark.parametrize("net", NETS)
def test_a_net_trains_on_every_gpu_and_its_speed_is_reported(net: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    rows = gpu(quick=True, net=net)["rows"]
    counts = sorted({1, torch.cuda.device_count()})
    assert [(row["gpus"], row["compiled"]) for row in rows] == [(n, way) for n in counts for way in (True, False)]
    assert not [row["failed"] for row in rows if "failed" in row]
    assert all(row["tokens_per_second"] > 0 and (row["mfu"] is None or 0 < row["mfu"] < 1) for row in rows)


def test_without_a_gpu_the_table_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert text(gpu(quick=True)) == "GPT-2 124M on a GPU skipped: torch sees no CUDA device"
    assert "4 of 32 experts on a GPU skipped: torch sees no CUDA device" in text(gpu(quick=True, net="deepseek"))


def test_a_row_that_fails_states_why_and_one_that_does_not_its_share() -> None:
    assert line({"gpus": 2, "compiled": True, "failed": "no compiler"}) == "2 x compiled: failed: no compiler"
    row = {"gpus": 1, "compiled": False, "device": "NVIDIA H200", "tokens_per_second": 1e6, "mfu": 0.415}
    assert line(row).split() == ["1", "x", "NVIDIA", "H200", "as", "it", "is", "1,000,000", "tokens/s", "41.5%"]


def test_the_batch_follows_from_memory() -> None:
    assert [sequences(gigabytes << 30) for gigabytes in (140, 48, 24, 8)] == [32, 16, 8, 4]


def test_the_loss_in_chunks_is_that_of_the_logits() -> None:
    class Small(Gpt2):
        def model(self) -> nn.Module:
            self._model = HiddenInTraining(vocabulary=50, width=16, heads=2, depth=1, length=8)
            return self._model

    task, tokens = Small(), torch.randint(50, (3, 9))
    model, batch = task.model(), {"x": tokens[:, :-1], "target": tokens[:, 1:]}
    assert model(batch["x"]).shape == (3, 8, 16)
    in_chunks = task.loss(model(batch["x"]), batch)
    whole = task.loss(model.eval()(batch["x"]), batch)
    torch.testing.assert_close(in_chunks, whole)
