"""Multi-token prediction as DeepSeek-V3 has it: one layer more, taught to say the token after the next one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm


class FurtherLayer(DeepseekV3DecoderLayer):  # type: ignore[misc]
    """What was thought in a place, and the token that came next; embedding and head are those of the model.

    It stands after the last layer and its weights have the names that official files give them, as
    `model.layers.4.eh_proj.weight`: whoever reads a checkpoint without it leaves them out.
    """

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__(config, config.num_hidden_layers)
        self.enorm, self.hnorm = _norm(config), _norm(config)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.shared_head = nn.ModuleDict({"norm": _norm(config)})

    def forward(self, hidden: Tensor, following: Tensor, **places: Any) -> Tensor:
        joined = self.eh_proj(torch.cat([self.enorm(following), self.hnorm(hidden)], dim=-1))
        found: Tensor = self.shared_head["norm"](super().forward(joined, **places))
        return found


class FurtherModel(DeepseekV3ForCausalLM):  # type: ignore[misc]
    """While it is taught and judged it answers twice: of the next token, and in the places behind of the one after."""

    writes = False  # from then on it answers of the next token alone

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__(config)
        self.model.layers.append(FurtherLayer(config))  # the body stops before it, at num_hidden_layers
        self.post_init()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        """`attention_mask` says of each place which it sees, as `language.mask_between_documents` makes it."""
        body = self.model
        hidden = body(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
        ).last_hidden_state
        logits: Tensor = self.lm_head(hidden)
        if self.writes:
            return logits
        before = hidden[:, :-1]  # the last place has no following token
        thought = body.layers[-1](
            before,
            body.embed_tokens(input_ids[:, 1:]),
            attention_mask=attention_mask[:, :, :-1, :-1],
            position_embeddings=body.rotary_emb(before, position_ids[:, :-1]),
        )
        return torch.cat([logits, self.lm_head(thought)], dim=1)


def without_further(model: FurtherModel) -> DeepseekV3ForCausalLM:
    """The model as it writes: the plain one of transformers, with the same weights."""
    model.writes = True
    config = model.config
    plain = DeepseekV3ForCausalLM(config)
    extra = f"model.layers.{config.num_hidden_layers}."
    plain.load_state_dict({name: t for name, t in model.state_dict().items() if not name.startswith(extra)})
    return plain.eval()


def _norm(config: DeepseekV3Config) -> Any:
    return DeepseekV3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
