"""Multi-token prediction as in DeepSeek-V3: one more layer, trained to predict the token after the next one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.masking_utils import create_causal_mask
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm


class MultiTokenLayer(DeepseekV3DecoderLayer):  # type: ignore[misc]
    """A layer on a position's hidden state and the next token; it shares embedding and head with the model.

    It follows the last layer. Its weights have the names of official files, such as `model.layers.4.eh_proj.weight`, so
    that code without this layer ignores them.
    """

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__(config, config.num_hidden_layers)
        self.enorm, self.hnorm = _norm(config), _norm(config)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.shared_head = nn.ModuleDict({"norm": _norm(config)})

    def forward(self, hidden: Tensor, following: Tensor, **positions: Any) -> Tensor:
        joined = self.eh_proj(torch.cat([self.enorm(following), self.hnorm(hidden)], dim=-1))
        normed: Tensor = self.shared_head["norm"](super().forward(joined, **positions))
        return normed


class MultiTokenModel(DeepseekV3ForCausalLM):  # type: ignore[misc]
    """A model that returns logits of the next token, followed by logits of the one after it."""

    next_token_only = False

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__(config)
        self.model.layers.append(MultiTokenLayer(config))  # the body ends before it, at num_hidden_layers
        self.post_init()

    def forward(self, input_ids: Tensor, attention_mask: None, position_ids: Tensor, use_cache: bool = False) -> Tensor:
        """Return both logits; `mask_between_texts` removes the mask, and transformers builds it from the positions."""
        body = self.model
        hidden = body(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=use_cache
        ).last_hidden_state
        logits: Tensor = self.lm_head(hidden)
        if self.next_token_only:
            return logits
        hidden_before = hidden[:, :-1]  # the last position has no next token
        second = body.layers[-1](
            hidden_before,
            body.embed_tokens(input_ids[:, 1:]),
            attention_mask=create_causal_mask(
                self.config, hidden_before, attention_mask, None, position_ids=position_ids[:, :-1]
            ),
            position_embeddings=body.rotary_emb(hidden_before, position_ids[:, :-1]),
        )
        return torch.cat([logits, self.lm_head(second)], dim=1)


def without_multi_token(model: MultiTokenModel) -> DeepseekV3ForCausalLM:
    """Return the plain model of transformers with the same weights, without the additional layer."""
    model.next_token_only = True
    config = model.config
    plain_model = DeepseekV3ForCausalLM(config)
    extra_layer = f"model.layers.{config.num_hidden_layers}."
    plain_model.load_state_dict({name: t for name, t in model.state_dict().items() if not name.startswith(extra_layer)})
    return plain_model.eval()


def _norm(config: DeepseekV3Config) -> Any:
    return DeepseekV3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
