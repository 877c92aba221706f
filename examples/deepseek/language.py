"""Attention masks for rows of several documents, for any causal language model of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def mask_between_documents(model: nn.Module) -> nn.Module:
    """Let the attention mask number the documents of a row: a token attends to earlier tokens with its own number.

    For a mask of zeros and ones, the model behaves as before. Its class and the names of its weights stay the same, so
    that its checkpoints have the layout of official ones.
    """
    model.register_forward_pre_hook(_widen, with_kwargs=True)
    return model


def document_mask(segments: Tensor) -> Tensor:
    """Return which positions each position attends to, [batch, 1, from, to]; padding attends to itself."""
    positions = torch.arange(segments.shape[1], device=segments.device)
    earlier, same_position = positions[:, None] > positions[None, :], positions[:, None] == positions[None, :]
    same_document = (segments[:, :, None] == segments[:, None, :]) & (segments != 0)[:, None, :]
    return ((same_document & earlier) | same_position)[:, None]


def _widen(
    _model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    inputs = dict(zip(("input_ids", "attention_mask", "position_ids"), arguments, strict=False)) | keywords
    mask = inputs.get("attention_mask")
    if mask is not None and mask.ndim == 2 and inputs.get("past_key_values") is None:
        inputs["attention_mask"] = document_mask(mask)
    return (), inputs
