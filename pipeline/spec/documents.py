"""Rows that hold several texts, for the causal language models of transformers as they stand: no text sees another."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pipeline.spec.errors import ConfigError, DataError

if TYPE_CHECKING:
    from torch import nn

# Those whose masks transformers build from positions, for any number of rows; flash attention does so for one row.
_KNOWN = ("sdpa", "eager", "flex_attention")


def see_documents(model: nn.Module) -> nn.Module:
    """From now on a token sees those before it of its own text: a text begins where `position_ids` begin anew.

    The mask of a batch is not looked at: padding on the left, each place of it at position 0, is seen by no text. A
    pass that goes on with a cache is left as it is. The model itself, its class and the names of its weights stay
    those of transformers.
    """
    names = list(inspect.signature(model.forward).parameters)
    model.register_forward_pre_hook(functools.partial(_keep_apart, names), with_kwargs=True)
    return model


def _keep_apart(
    names: Sequence[str], model: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    words = dict(zip(names, given, strict=False)) | named
    mask = words.get("attention_mask")
    if words.get("past_key_values") is None and (mask is None or mask.ndim == 2):
        _check(model, words)
        # With a mask, or with a cache to fill, transformers take a row for one text whatever its positions say.
        words |= {"attention_mask": None, "use_cache": False}
    return (), words


def _check(model: nn.Module, words: dict[str, Any]) -> None:
    kind = getattr(model.config, "_attn_implementation", None)
    if kind not in _KNOWN:
        raise ConfigError(
            f"attention by {kind!r} does not keep the texts of a row apart; "
            f"build the model with attn_implementation={_KNOWN[0]!r}"
        )
    if words.get("position_ids") is None:
        raise DataError("the model is given no position_ids, which tell where each text of a row begins; name them")
