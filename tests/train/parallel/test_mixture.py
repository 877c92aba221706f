"""A mixture of experts trained by real processes, as `pipe` starts them."""

from __future__ import annotations

import pytest

from pipeline.system.errors import ConfigError

from ..conftest import Project, failure, journal
from .conftest import assert_close, resumed, trained

MODEL = """
class Language(nn.Module):
    def __init__(self):
        from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

        super().__init__()
        heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 8}
        heads |= {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 6}
        mixture = {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1}
        sizes = {"hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8, "num_hidden_layers": 2}
        config = DeepseekV3Config(vocab_size=11, topk_group=1, use_cache=False, **heads, **mixture, **sizes)
        self.inner = DeepseekV3ForCausalLM(config)

    def forward(self, tokens):
        return self.inner(tokens).logits


class Tiny:"""


@pytest.mark.long
def test_split_experts_resume_as_one_process_does(transformer: Project) -> None:
    transformer.replace("class Tiny:", MODEL)
    transformer.replace("return Llama()", "return Language()")
    settings = {"epochs": 1, "checkpoint_every": 2, "keep_checkpoints": 9, "optimizer": "sgd"}
    one = trained(transformer, "one", 1, **settings)
    two = resumed(transformer, one, "two", 2, 2, expert_parallel=2, strategy="fsdp", **settings)
    assert_close(two, one)
    assert journal(two)[-2]["expert_loads"] == journal(one)[-2]["expert_loads"]
    uneven = transformer.run("uneven", expert_parallel=2)
    assert transformer.train(uneven, 3).returncode != 0
    assert isinstance(failure(uneven), ConfigError)
    assert (
        "the experts cannot be divided among 3 copies of the model; to fix it, make train.processes a multiple of 2"
        in str(failure(uneven))
    )
