"""A language model as one graph for prompts and for every further token: what it has read goes in and comes out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from export.to_onnx import Written, write_onnx
from export.trace import Traced
from pipeline.contract.errors import StageError
from pipeline.contract.settings.stages import Export
from pipeline.contract.signature import Cache, Generation, Prompting
from pipeline.contract.task import Generates

_ROWS, _SEQUENCE, _PAST = 3, 5, 7  # unequal and above 1, so that no axis is taken for another or for a constant


@dataclass(frozen=True)
class Kept:
    """A tensor that a layer keeps: [batch, heads, past, width]."""

    name: str  # as `0.key`
    heads: int
    width: int


class Cached(nn.Module):
    """The causal model with its cache as plain tensors, a pair for each layer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, mask: Tensor, positions: Tensor, past: list[Tensor]) -> tuple[Tensor, ...]:
        cache = new_cache(self.model)
        for layer in range(len(past) // 2):
            cache.update(past[2 * layer], past[2 * layer + 1], layer)
        found = self.model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        )
        kept = [tensor for layer in found.past_key_values.layers for tensor in (layer.keys, layer.values)]
        return found.logits, *kept


def new_cache(model: nn.Module) -> Any:
    """Without a position in it. The import is here because only language models need the package."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def generation_of(task: Generates, model: nn.Module) -> Generation:
    """Return the generation section of the signature, from the model and its task."""
    properties, known = task.prompting(), known_positions(model)
    if properties.positions_limit > known:
        raise StageError(
            f"prompting() allows {properties.positions_limit} positions, but the model's configuration ends at {known} "
            "(max_position_embeddings): beyond it the model was never trained"
        )
    return Generation(
        caches=tuple(Cache(input=f"past.{one.name}", output=f"present.{one.name}") for one in kept_by(model)),
        positions_limit=properties.positions_limit or known,
        **properties.model_dump(include=_PROMPTING_FIELDS),
    )


def known_positions(model: nn.Module) -> int:
    found = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if not isinstance(found, int):
        raise StageError(
            f"language_model() gives a {type(model).__name__} without config.max_position_embeddings; "
            "give the causal model of `transformers` itself"
        )
    return found


@torch.no_grad()
def kept_by(model: nn.Module) -> tuple[Kept, ...]:
    """Return the cache of the model after two positions."""
    ids = torch.zeros((1, 2), dtype=torch.long)
    layers = model(input_ids=ids, past_key_values=new_cache(model), use_cache=True).past_key_values.layers
    latent = getattr(model.config, "kv_lora_rank", None) is not None  # DeepSeek caches what keys and values come from
    found = []
    for index, layer in enumerate(layers):
        if (kind := type(layer).__name__) != "DynamicLayer":
            raise StageError(f"layer {index} of the model keeps a {kind}; only caches of all positions can be exported")
        for name, tensor in zip(
            ("latent", "rope") if latent else ("key", "value"), (layer.keys, layer.values), strict=True
        ):
            if tensor.dtype != torch.float32:
                raise StageError(f"layer {index} of the model computes in {tensor.dtype}; export it in float32")
            found.append(Kept(f"{index}.{name}", tensor.shape[1], tensor.shape[3]))
    return tuple(found)


def convert_language(model: nn.Module, generation: Generation, config: Export, path: Path) -> Written:
    """Write `path`."""
    return write_onnx(traced_language(model, generation), config, path)


def traced_language(model: nn.Module, generation: Generation) -> Traced:
    """Ids, mask, positions and past in; logits and the longer past out."""
    kept = kept_by(model)
    total = _SEQUENCE + _PAST
    if generation.positions_limit < total:
        raise StageError(f"a language model of {generation.positions_limit} positions is too short; {total} at least")
    ids = torch.arange(_ROWS * _SEQUENCE).reshape(_ROWS, _SEQUENCE) % 2
    mask = torch.ones((_ROWS, total), dtype=torch.long)
    mask[0, :2] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, _PAST:]
    past = [torch.zeros(_ROWS, one.heads, _PAST, one.width) for one in kept]
    tokens, everything, before = ({0: "batch", 1: axis} for axis in ("sequence", "total", "sequence"))
    return Traced(
        Cached(model),
        (ids, mask, positions, past),
        (generation.ids, generation.mask, generation.positions, *(cache.input for cache in generation.caches)),
        (generation.logits, *(cache.output for cache in generation.caches)),
        (tokens, everything, before, [{0: "batch", 2: "past"} for _ in past]),
    )


_PROMPTING_FIELDS = set(Prompting.model_fields) & set(Generation.model_fields) - {"positions_limit"}
