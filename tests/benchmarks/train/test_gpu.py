from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.train.flops import active_parameters, flops_per_token, peak_flops
from benchmarks.train.gpu import gpu, line, text
from benchmarks.train.large import LENGTH, NETS, DeepSeek, sequences


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


def test_a_device_has_the_peak_of_the_longest_name_that_fits() -> None:
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("Some Other Card") is None


def test_the_batch_and_the_work_follow_from_memory_and_size() -> None:
    assert [sequences(gigabytes << 30) for gigabytes in (140, 48, 24, 8)] == [32, 16, 8, 4]
    assert flops_per_token(124_000_000, 12, 768, 1024) == pytest.approx(857e6, rel=0.01)


def test_only_experts_that_a_token_takes_count_and_no_table_it_is_looked_up_in() -> None:
    """Reckoned by hand for a small one, layer by layer."""
    size = DeepSeek.size | {"num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 100, "moe_intermediate_size": 8}
    size |= {"intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 6}
    size |= {"num_experts_per_tok": 2, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
    task = type("Small", (DeepSeek,), {"size": size | {"v_head_dim": 10, "tie_word_embeddings": False}})()
    model = task.model()
    attention = 32 * 2 * 12 + 32 * (16 + 4) + 16 + 16 * 2 * (8 + 10) + 2 * 10 * 32
    dense, expert, router = 3 * 32 * 48, 3 * 32 * 8, 32 * 6
    norms, head = 2 * 2 * 32 + 32, 100 * 32
    expected = 2 * attention + dense + (2 + 1) * expert + router + norms + head
    assert active_parameters(model, 2) == expected
    assert task.flops_per_token(model) == 6 * expected + 12 * 2 * (2 * (12 + 10) // 2) * LENGTH
    model.lm_head.weight = model.get_submodule("model.embed_tokens").weight
    assert active_parameters(model, 2) == expected, "a shared table is the head"
    assert active_parameters(nn.Linear(3, 4)) == 16
