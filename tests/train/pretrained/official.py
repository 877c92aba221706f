"""Tiny random checkpoints in the layout of official ones, for models of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

_SIZES = {"vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 4, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "torch_dtype": "float32"}
_EXPERTS = {
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "norm_topk_prob": True,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "rope_theta": 10000,
    "hidden_act": "silu",
}
# As in official files: with their own code, which is never run, and older names for positions.
CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        **_SIZES,
        **_HEADS,
        **_EXPERTS,
        "architectures": ["DeepseekV3ForCausalLM"],
        "q_lora_rank": 12,
        "auto_map": {
            "AutoConfig": "configuration_deepseek.DeepseekV3Config",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
        },
        "n_group": 2,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "ep_size": 1,
        "num_nextn_predict_layers": 1,
        "routed_scaling_factor": 2.5,
        "moe_layer_freq": 1,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4,
            "original_max_position_embeddings": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "deepseek_v2": {
        **_SIZES,
        **_HEADS,
        **_EXPERTS,
        "architectures": ["DeepseekV2ForCausalLM"],
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "routed_scaling_factor": 1.0,
    },
    "qwen2": {
        **_SIZES,
        **_HEADS,
        "architectures": ["Qwen2ForCausalLM"],
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "rope_theta": 10000,
        "use_sliding_window": False,
        "sliding_window": 64,
    },
    "llama": {
        **_SIZES,
        **_HEADS,
        "architectures": ["LlamaForCausalLM"],
        "num_key_value_heads": 2,
        "rope_theta": 5e5,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "rope_type": "llama3",
            "original_max_position_embeddings": 32,
        },
    },
    "qwen3": {
        **_SIZES,
        **_HEADS,
        "architectures": ["Qwen3ForCausalLM"],
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": False,
    },
}


def write_official(folder: Path, kind: str) -> Path:
    """Write several shards with random weights, so that no bias or scale has its initial value."""
    folder.mkdir(parents=True)
    config = {"model_type": kind, **CONFIGS[kind]}
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.normal_(std=0.3)
    model.save_pretrained(folder, max_shard_size="12KB")
    (folder / "config.json").write_text(json.dumps(config))  # transformers has rewritten it
    return folder
