"""Rows that hold several documents, for any causal language model of transformers as it stands."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def mask_between_documents(model: nn.Module) -> nn.Module:
    """From now on the mask may number the documents of a row: a token sees those before it with its own number.

    With a mask of zeros and ones that is what the model does anyway. The model itself, its class and the names of its
    weights stay those of transformers, so that what is trained here is a checkpoint as official ones are.
    """
    model.register_forward_pre_hook(_widen, with_kwargs=True)
    return model


def visible(segments: Tensor) -> Tensor:
    """Which places each place sees: [batch, 1, from, to]. Padding sees itself: a softmax over nothing is no number."""
    place = torch.arange(segments.shape[1], device=segments.device)
    earlier, itself = place[:, None] > place[None, :], place[:, None] == place[None, :]
    same = (segments[:, :, None] == segments[:, None, :]) & (segments != 0)[:, None, :]
    return ((same & earlier) | itself)[:, None]


def _widen(_model: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    words = dict(zip(("input_ids", "attention_mask", "position_ids"), given, strict=False)) | named
    mask = words.get("attention_mask")
    if mask is not None and mask.ndim == 2 and words.get("past_key_values") is None:
        words["attention_mask"] = visible(mask)
    return (), words
