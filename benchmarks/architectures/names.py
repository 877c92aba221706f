"""The architectures: a module of its library each, in the kind that fits it best, and what makes it tiny."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

# The smallest network of each module of the library that has classifiers.
_TORCHVISION = (
    "alexnet convnext_tiny densenet121 efficientnet_b0 googlenet inception_v3 maxvit_t mnasnet0_5 mobilenet_v2 "
    "mobilenet_v3_small regnet_x_400mf resnet18 shufflenet_v2_x0_5 squeezenet1_1 swin_t vgg11 vit_b_32"
)
# The smallest of each module, if it has no more than 10 million weights.
_TIMM = """
convit_tiny cpubone_nano crossvit_tiny_240 cs3darknet_focus_s cspnext_tiny deit_tiny_patch16_224 dla46x_c dpn48b
edgenext_xx_small efficientformerv2_s0 efficientvim_m1 efficientvit_b0 efficientvit_m0 ese_vovnet19b_slim_dw
fasternet_t0 fastvit_t8 gernet_s ghostnet_050 gmlp_ti16_224 hardcorenas_b hgnetv2_b0 iformer_t inception_next_atto
lcnetv2_small levit_128s mnasnet_small mobilenetv3_small_050 mobilevit_xxs pit_ti_224 pvt_v2_b0 regnetx_002
repghostnet_050 repvit_m1 resnet10t rexnet_100 shvit_s1 starnet_s050 swiftformer_xs test_coatnet test_convnext
test_mambaout test_nfnet test_vit test_vit_relpos vit_tiny_r_s16_p8_224 xcit_nano_12_p8_224
"""

# Of the language models that are written as changes of another one, the best known.
_DERIVED = (
    "apertus biogpt bitnet cohere cohere2 deepseek_v3 ernie4_5 exaone4 falcon_mamba gemma gemma2 glm4 gpt_neox gpt_oss "
    "granite granitemoe helium jamba lfm2 mistral mixtral modernbert-decoder olmo2 olmoe phi phi3 qwen2 qwen2_moe "
    "qwen3 qwen3_moe smollm3 starcoder2 zamba2"
)
_TAGGERS = ("bros", "layoutlm", "layoutlmv2", "layoutlmv3", "lilt", "luke", "markuplm")
_EMBEDDERS = ("albert", "distilbert", "gte", "jina_embeddings_v3", "modernbert", "mpnet", "nomic_bert", "xlm-roberta")
# Pictures or sounds beside texts; and the networks of timm, which are in the list.
_LEFT_OUT = ("modernvbert", "qwen3_asr", "shieldgemma2", "t5gemma2", "timm_wrapper", "ultravbert")

SMALL: Mapping[str, int] = {
    name: size
    for size, names in {
        1: "depth num_blocks",
        2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers layers "
        "num_key_value_heads num_experts_per_tok num_self_attends_per_block speech_encoder_layers",
        4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts "
        "num_local_experts n_routed_experts attention_heads rotary_dim",
        8: "head_dim kv_channels qk_nope_head_dim qk_rope_head_dim v_head_dim",
        16: "q_lora_rank kv_lora_rank num_queries num_latents num_conv_pos_embeddings",
        32: "hidden_size d_model n_embd dim emb_dim embed_dim embedding_size d_embed d_latents encoder_hidden_dim",
        64: "intermediate_size encoder_ffn_dim decoder_ffn_dim d_ff ffn_dim d_inner moe_intermediate_size vocab_size "
        "max_position_embeddings n_positions image_size max_2d_position_embeddings",
    }.items()
    for name in names.split()
}
TEXT_IDS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
_DETR = ("conditional_detr", "dab-detr", "deformable_detr", "detr", "table-transformer")
# What some need besides; a configuration must fit together.
EXCEPTIONS: Mapping[str, Mapping[str, Any]] = {
    **{name: {"backbone": "test_resnet"} for name in _DETR},
    "cvt": {"depth": [1, 2, 3], "embed_dim": [16, 48, 96]},
    "deepseek_v3": {"n_group": 2, "topk_group": 1, "num_key_value_heads": 4},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.2, "hidden_dim": 320},
    "esm": {"vocab_size": 64},
    "esmc": {"num_key_value_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granite_speech5_ctc": {"encoder_config": {"context_size": 32, "hidden_dim": 32}},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4},
    "lilt": {"hidden_size": 48},
    "luke": {"entity_vocab_size": 16},
    "mamba2": {"head_dim": 16, "n_groups": 1},
    "mistral4": {"head_dim": 16, "num_key_value_heads": 4},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "pvt": {"num_labels": 3},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (8, 8)},
    "rt_detr": {
        "backbone_config": {"model_type": "rt_detr_resnet", "depths": [1] * 4, "out_indices": [2, 3, 4]},
        "decoder_in_channels": [32] * 3,
    },
    **{name: {"window_size": 2} for name in ("donut-swin", "swin", "swinv2")},
    **{name: {"decoder_start_token_id": 0} for name in ("t5", "mt5", "umt5")},
    **{name: {"vocab_size": 64} for name in ("wav2vec2-bert", "wav2vec2-conformer")},
    "xmod": {"default_language": "en_XX"},
    **{name: {"num_hidden_layers": 4, "layer_types": ["mamba", "hybrid"] * 2} for name in ("zamba", "zamba2")},
}


def list_architectures() -> dict[str, str]:
    """Return the kind of each architecture by its name, as in `transformers:bert`."""
    networks = {"timm": _TIMM.split(), "torchvision": _TORCHVISION.split()}
    rows = {f"transformers:{name}": kind for name, kind in _model_types().items()}
    return rows | {f"{library}:{name}": "images" for library, names in networks.items() for name in names}


def _model_types() -> dict[str, str]:
    """Return the model types of transformers, one of each of its modules, with the kind that fits best."""
    import transformers
    from transformers.models.auto import modeling_auto as auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name

    classes, kinds, modules = class_names(), {}, set()
    for name in sorted({name for names in classes.values() for name in names}):
        module = model_type_to_module_name(name)
        if module in modules or name in _LEFT_OUT or name not in CONFIG_MAPPING:
            continue
        config = CONFIG_MAPPING[name]
        if config.model_type != name:  # another name of the same classes
            continue
        candidates = [kind for kind, names in classes.items() if name in names]
        if getattr(config, "is_encoder_decoder", False) or name in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
            candidates = [kind for kind in candidates if kind != "language"]
        is_derived = any((Path(transformers.__file__).parent / "models" / module).glob("modular_*.py"))
        if candidates[:1] == ["language"] and (config.sub_configs or (is_derived and name not in _DERIVED.split())):
            continue
        if candidates:
            modules.add(module)
            chosen = {**dict.fromkeys(_TAGGERS, "tokens"), **dict.fromkeys(_EMBEDDERS, "embeddings"), "xlnet": "texts"}
            kinds[name] = chosen.get(name, candidates[0])
    return kinds


def class_names() -> dict[str, dict[str, Any]]:
    """Return the classes of the kinds that `pipe export` takes, by their model types."""
    from transformers.models.auto import modeling_auto as auto

    boxes = auto.MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES
    endings = ("DetrForObjectDetection", "YolosForObjectDetection", "TableTransformerForObjectDetection")
    return {
        "images": dict(auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES),
        "boxes": {name: architecture for name, architecture in boxes.items() if architecture.endswith(endings)},
        "speech": {"whisper": "WhisperForConditionalGeneration"},
        "ctc": dict(auto.MODEL_FOR_CTC_MAPPING_NAMES),
        "sounds": dict(auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES),
        "language": dict(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        "texts": dict(auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES),
        "tokens": dict(auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES),
        "embeddings": {name: auto.MODEL_MAPPING_NAMES[name] for name in _EMBEDDERS},
    }
