from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from pipeline.spec.documents import see_documents
from pipeline.spec.errors import ConfigError, DataError
from pipeline.spec.packing import Rows, cut, one_a_row, pack

PLAIN = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LATENT = {
    "q_lora_rank": None,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "deepseek_v2": lambda: DeepseekV2ForCausalLM(DeepseekV2Config(**PLAIN, **LATENT, topk_method="greedy")),
    "deepseek_v3": lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**PLAIN, **LATENT, num_mtp_layers=0)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**PLAIN)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**PLAIN)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**PLAIN, head_dim=8)),
    "mistral, a window of 4": lambda: MistralForCausalLM(MistralConfig(**PLAIN, sliding_window=4)),
}


def lengths(seed: int) -> list[int]:
    """As functions have them: many short, few long."""
    draw = random.Random(seed)
    return [min(2 + int(draw.expovariate(1 / 12)), 40) for _ in range(300)]


def ids_of(*sizes: int) -> list[list[int]]:
    draw = np.random.default_rng(0)
    return [draw.integers(1, 64, size).tolist() for size in sizes]


def fed(rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    return torch.from_numpy(rows.ids), torch.from_numpy(rows.segments), torch.from_numpy(rows.positions)


@pytest.mark.parametrize("seed", range(3))
def test_every_text_stands_in_one_row_whole_and_once(seed: int) -> None:
    texts = [[1000 * number + place for place in range(length)] for number, length in enumerate(lengths(seed), 1)]
    rows = pack(texts, 40, pad=7)
    found = []
    for ids, segments, positions in zip(rows.ids, rows.segments, rows.positions, strict=True):
        assert (np.diff(segments) >= 0).all(), "padding on the left, then the texts in order"
        assert (ids[segments == 0] == 7).all()
        for number in range(1, segments.max() + 1):
            own = segments == number
            assert positions[own].tolist() == list(range(own.sum()))
            found.append(ids[own].tolist())
    assert sorted(found) == texts


def test_packing_leaves_little_padding_where_rows_of_their_own_would_be_mostly_that() -> None:
    texts = [[1] * length for length in lengths(0)]
    assert one_a_row(texts, 40, pad=0).padding > 0.6
    assert pack(texts, 40, pad=0).padding < 0.02


def test_a_text_goes_into_the_first_row_with_room_and_one_without_any_is_refused() -> None:
    rows = pack([[1] * 6, [2] * 5, [3] * 4, [4] * 5, [5] * 10], 10, pad=0)
    assert [sorted(set(row.tolist())) for row in rows.ids] == [[1, 3], [2, 4], [5]]
    for lay_out in (pack, one_a_row):
        with pytest.raises(DataError, match="a text of 11 tokens is longer than a row of 10"):
            lay_out([[1] * 11], 10, pad=0)


def test_a_long_text_is_cut_and_an_end_without_anything_to_predict_is_left_out() -> None:
    assert cut([list(range(9)), [1], []], 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_packed_text_gives_the_logits_it_gives_alone(name: str) -> None:
    """Though masks are given, and models keep a cache unless they are told not to: both would let texts through."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    texts = ids_of(5, 9, 1, 14, 3, 2)
    alone = [model(torch.tensor([text])).logits[0] for text in texts]  # as transformers itself masks and counts
    see_documents(model)
    packed = pack([*texts, *ids_of(30, 8)], 48, pad=0)
    assert packed.ids.shape == (2, 48) and packed.segments[0].max() > 5 and packed.padding
    ids, segments, positions = fed(packed)
    together = model(ids, segments, positions).logits
    for number, (text, expected) in enumerate(zip(texts, alone, strict=True), 1):
        own = segments[0] == number
        assert ids[0][own].tolist() == text
        torch.testing.assert_close(together[0][own], expected, rtol=1e-4, atol=1e-5)


def test_no_gradient_comes_from_another_text() -> None:
    model = see_documents(MODELS["llama"]())
    ids, segments, positions = fed(pack(ids_of(6, 7), 16, pad=0))
    embedded = model.get_submodule("model.embed_tokens")(ids).detach().requires_grad_()
    found = model(inputs_embeds=embedded, attention_mask=segments, position_ids=positions).logits
    found[segments == 2].square().sum().backward()
    assert embedded.grad is not None
    assert (embedded.grad[segments == 2] != 0).any() and not embedded.grad[segments != 2].any()


@torch.no_grad()
def test_a_row_of_one_text_with_padding_is_what_the_model_alone_makes_of_it() -> None:
    model = MODELS["qwen2"]().eval()
    texts = ids_of(4, 7)
    alone = [model(torch.tensor([text])).logits[0] for text in texts]
    found = see_documents(model)(*fed(one_a_row(texts, 9, pad=0))).logits
    for row, expected in zip(found, alone, strict=True):
        torch.testing.assert_close(row[-len(expected) :], expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_pass_that_goes_on_with_a_cache_is_left_as_it_is() -> None:
    model = see_documents(MODELS["llama"]()).eval()
    (ids,) = ids_of(8)
    whole = model(torch.tensor([ids]), position_ids=torch.arange(8)[None]).logits
    plain = LlamaForCausalLM(LlamaConfig(**PLAIN)).eval()
    plain.load_state_dict(model.state_dict())
    cache = plain(torch.tensor([ids[:7]])).past_key_values
    step = model(torch.tensor([ids[7:]]), torch.ones(1, 8), torch.tensor([[7]]), past_key_values=cache)
    torch.testing.assert_close(step.logits[0, 0], whole[0, 7], rtol=1e-4, atol=1e-5)


def test_what_cannot_keep_texts_apart_is_refused() -> None:
    model = see_documents(MODELS["llama"]())
    ids = torch.ones(1, 4, dtype=torch.int64)
    with pytest.raises(DataError, match="no position_ids"):
        model(ids)
    model.config._attn_implementation = "flash_attention_2"  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="attention by 'flash_attention_2' does not keep the texts of a row apart"):
        model(ids, None, ids)
