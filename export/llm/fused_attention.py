"""Export a language model with ONNX's own operators for attention, norms and rotary embeddings.

ONNX Runtime's GroupQueryAttention was slower, does not continue several prompts at once, and is outside the ONNX
standard.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from export.conversion.optimize import Optimization, operators, remove_model
from export.conversion.to_onnx import ExportResult, write_onnx
from export.conversion.trace import ExportInput
from pipeline.contract.settings.stages import Export
from pipeline.system.errors import StageError

_FUSED_OPSET = 23  # the first with Attention, RMSNormalization and RotaryEmbedding
_FUSED_OPERATORS = ("Attention", "RMSNormalization", "RotaryEmbedding")
_FUSED_ATTENTION = "onnx_attention"  # our name among the attention functions of `transformers`


def convert_fused(decoder: ExportInput, config: Export, path: Path) -> tuple[ExportResult | None, Optimization]:
    """Write a language model with fused operators to `path`; return None and the reason if that is impossible."""
    try:
        with _fused_attention(decoder.module):
            written = write_onnx(decoder, config.model_copy(update={"opset": max(config.opset, _FUSED_OPSET)}), path)
    except (StageError, TypeError) as error:  # attention may take other arguments than those of _attend
        remove_model(path)
        return None, Optimization(config.optimize, "none", {}, str(error))
    counts = operators(path)
    fused = {kind: counts[kind] for kind in _FUSED_OPERATORS if kind in counts}
    # Torch cannot run the trace, which has ONNX's operator for attention, to explain a difference.
    return replace(written, program=None), Optimization(config.optimize, config.optimize, fused)


@contextmanager
def _fused_attention(model: nn.Module) -> Iterator[None]:
    """Compute attention by one operator of ONNX within the context, and restore the previous way."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(_FUSED_ATTENTION, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_FUSED_ATTENTION, sdpa_mask)
    every_config = (getattr(module, "config", None) for module in model.modules())
    configs: list[Any] = [config for config in every_config if hasattr(config, "_attn_implementation")]
    implementations = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            config._attn_implementation = _FUSED_ATTENTION
        yield
    finally:
        for config, implementation in zip(configs, implementations, strict=True):
            config._attn_implementation = implementation


def _attend(
    _module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """Attend as `transformers` expects it; the heads of keys and values are not repeated for those of the queries."""
    names = {"scaling": "scale", "softcap": "softcap"}
    attended = torch.onnx.ops.symbolic(  # torch.onnx.ops.attention takes the width of queries for that of values
        "Attention",
        (query, key, value, mask),
        {names[name]: float(setting) for name, setting in settings.items() if name in names and setting is not None},
        dtype=query.dtype,
        shape=(*query.shape[:3], value.shape[3]),
        version=_FUSED_OPSET,
    )
    return attended.transpose(1, 2), None
