"""Nets for a GPU, on random tokens: GPT-2 of 124 million parameters, and a DeepSeek-V3 that makes use of as many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.train.transformer import Transformer
from benchmarks.train.workloads import Synthetic
from pipeline import linear_cross_entropy

if TYPE_CHECKING:
    from pipeline import Batch, Outputs


LENGTH = 1024
_VOCABULARY, _WIDTH, _HEADS, _DEPTH = 50304, 768, 12, 12
_DEEPSEEK = {
    "vocab_size": 32768,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 12,
    "first_k_dense_replace": 1,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "q_lora_rank": None,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "n_routed_experts": 32,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_mtp_layers": 0,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": True,
    "use_cache": False,
}


class HiddenInTraining(Transformer):
    """Leaves the head to the loss in training, so that the logits of all tokens never exist."""

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden(x) if self.training else super().forward(x)


class Gpt2(Synthetic):
    vocabulary = _VOCABULARY

    def model(self) -> nn.Module:
        self._model = HiddenInTraining(_VOCABULARY, _WIDTH, _HEADS, _DEPTH, LENGTH)
        return self._model

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        assert isinstance(outputs, Tensor)
        if not self._model.training:
            return super().loss(outputs, batch)
        return linear_cross_entropy(outputs, self._model.token.weight, batch["target"])

    def data(self, split: str) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(len(split))
        text = torch.randint(self.vocabulary, (1 << 14, LENGTH + 1), generator=generator)
        return {"x": text[:, :-1].contiguous(), "target": text[:, 1:].contiguous()}


class DeepSeek(Gpt2):
    """With the experts' weights read in groups of tokens, as transformers do on a GPU."""

    vocabulary = _DEEPSEEK["vocab_size"] or 0
    size: dict[str, Any] = _DEEPSEEK

    def model(self) -> nn.Module:
        from transformers import DeepseekV3Config, DeepseekV3ForCausalLM  # here: GPT-2 needs it not

        model: nn.Module = DeepseekV3ForCausalLM(DeepseekV3Config(**self.size))
        return model

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        assert isinstance(outputs, Tensor)
        return functional.cross_entropy(outputs.flatten(0, -2).float(), batch["target"].flatten())


@dataclass(frozen=True)
class Large:
    title: str
    make: Callable[[], Gpt2]


NETS = {
    "gpt2": Large("GPT-2 124M", Gpt2),
    "deepseek": Large("DeepSeek-V3, 12 layers, 4 of 32 experts", DeepSeek),
}


def sequences(memory_bytes: int) -> int:
    """Return the batch size that fits on one GPU with the parameters and the logits of every token."""
    return next((count for count, gigabytes in ((32, 70), (16, 40), (8, 20)) if memory_bytes >= gigabytes << 30), 4)
