"""The graph of a language model, with its cache as inputs and outputs, and torch's decoder as the reference.

The graph reads a prompt or one further token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from export.compare import Array, Arrays, Graph
from export.conversion.to_onnx import ExportResult, tensor_specs, write_onnx
from export.conversion.trace import ExportInput
from export.sessions import open_graph
from pipeline.contract.data import Samples
from pipeline.contract.golden import Decoder, empty_past, inputs_of
from pipeline.contract.prompting import LEAST_POSITIONS, check_ids, empty_cache, positions_limit, read_prompting
from pipeline.contract.settings.stages import Export
from pipeline.contract.signature import Cache, Generation, Prompting
from pipeline.contract.task import Generates
from pipeline.system.errors import StageError

# Unequal and above 1, so that no axis is taken for another or for a constant.
_ROWS, _SEQUENCE, _PAST = 3, 5, LEAST_POSITIONS - 5


@dataclass(frozen=True)
class CacheTensor:
    """A tensor in the cache of a layer: [batch, heads, past, width]."""

    name: str  # as `0.key`
    heads: int
    width: int


class CachedModel(nn.Module):
    """The causal model with its cache as plain tensors, a pair for each layer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, mask: Tensor, positions: Tensor, past: list[Tensor]) -> tuple[Tensor, ...]:
        cache = empty_cache(self.model)
        for layer in range(len(past) // 2):
            cache.update(past[2 * layer], past[2 * layer + 1], layer)
        result = self.model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        )
        cache_tensors = [tensor for layer in result.past_key_values.layers for tensor in (layer.keys, layer.values)]
        return result.logits, *cache_tensors


def make_generation(task: Generates, model: nn.Module) -> Generation:
    """Return the generation section of the signature, from the model and its task."""
    properties = task.prompting()
    return Generation(
        positions_limit=positions_limit(properties, model),
        caches=tuple(
            Cache(input=f"past.{tensor.name}", output=f"present.{tensor.name}") for tensor in list_cache_tensors(model)
        ),
        attention_heads=getattr(model.config, "num_attention_heads", 1),
        **properties.model_dump(include=_PROMPTING_FIELDS),
    )


@torch.no_grad()
def list_cache_tensors(model: nn.Module) -> tuple[CacheTensor, ...]:
    """Return the cache of the model after two positions."""
    ids = torch.zeros((1, 2), dtype=torch.long)
    cache = getattr(model(input_ids=ids, past_key_values=empty_cache(model), use_cache=True), "past_key_values", None)
    if cache is None:
        raise StageError("the language model returns no keys and values; choose a model that caches them")
    latent = getattr(model.config, "kv_lora_rank", None) is not None  # DeepSeek caches what keys and values come from
    tensors = []
    for index, layer in enumerate(cache.layers):
        for name, tensor in zip(
            ("latent", "rope") if latent else ("key", "value"), (layer.keys, layer.values), strict=True
        ):
            if tensor.dtype != torch.float32:
                raise StageError(f"layer {index} of the model computes in {tensor.dtype}; export it in float32")
            tensors.append(CacheTensor(f"{index}.{name}", tensor.shape[1], tensor.shape[3]))
    return tuple(tensors)


def convert_language(model: nn.Module, generation: Generation, config: Export, path: Path) -> ExportResult:
    """Write `path`."""
    return write_onnx(language_export_input(model, generation), config, path)


def language_export_input(model: nn.Module, generation: Generation) -> ExportInput:
    """Return the export input: ids, mask, positions and past in; logits and the longer past out."""
    caches = list_cache_tensors(model)
    ids = torch.arange(_ROWS * _SEQUENCE).reshape(_ROWS, _SEQUENCE) % 2
    mask = torch.ones((_ROWS, _SEQUENCE + _PAST), dtype=torch.long)
    mask[0, :2] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, _PAST:]
    past = [torch.zeros(_ROWS, tensor.heads, _PAST, tensor.width) for tensor in caches]
    ids_axes, mask_axes, positions_axes = ({0: "batch", 1: axis} for axis in ("sequence", "total", "sequence"))
    return ExportInput(
        CachedModel(model),
        (ids, mask, positions, past),
        (generation.ids, generation.mask, generation.positions, *(cache.input for cache in generation.caches)),
        (generation.logits, *(cache.output for cache in generation.caches)),
        (ids_axes, mask_axes, positions_axes, [{0: "batch", 2: "past"} for _ in past]),
    )


def complete_generation(generation: Generation, task: Generates, files: Path) -> Generation:
    """Add what the task does not declare, from the files that model, data and codec share."""
    completed = read_prompting(task.prompting(), files).model_dump(include=_PROMPTING_FIELDS)
    return Generation.model_validate({**generation.model_dump(), **completed})


_PROMPTING_FIELDS = set(Prompting.model_fields) & set(Generation.model_fields) - {"positions_limit"}


class TorchDecoder:
    """The reference: torch, with the same inputs as the graph, or recomputing from the start for every token."""

    def __init__(self, model: nn.Module, generation: Generation) -> None:
        self.cached, self.generation = CachedModel(model).eval(), generation

    @torch.no_grad()
    def run(self, feed: Mapping[str, Array]) -> Arrays:
        tensors = {name: torch.from_numpy(array) for name, array in feed.items()}
        generation = self.generation
        past = [tensors[cache.input] for cache in generation.caches]
        outputs = self.cached(tensors[generation.ids], tensors[generation.mask], tensors[generation.positions], past)
        names = (generation.logits, *(cache.output for cache in generation.caches))
        return {name: tensor.numpy() for name, tensor in zip(names, outputs, strict=True)}

    @torch.no_grad()
    def greedy(self, prompt: Sequence[int], most: int) -> list[int]:
        """Generate without cache, padding or batching."""
        ids = list(prompt)
        while len(ids) - len(prompt) < most and (ids[-1] not in self.generation.end or len(ids) == len(prompt)):
            positions = torch.arange(len(ids))[None]  # which a model needs that keeps packed texts apart
            logits = self.cached.model(input_ids=torch.tensor([ids]), position_ids=positions, use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
        return ids[len(prompt) :]


def to_decoder(graph: Graph, path: Path, generation: Generation) -> Decoder:
    """Return a graph with the inputs of the file as a decoder."""
    return Decoder(graph, generation, {spec.name: spec for spec in tensor_specs(path)[0]})


def open_decoder(path: Path, generation: Generation) -> Decoder:
    return to_decoder(open_graph(path), path, generation)


MAX_LOGITS = 1 << 24  # compared at once; a vocabulary is wide


@dataclass(frozen=True)
class Texts:
    """A batch of the test set as inputs of the graph."""

    batch: Mapping[str, Tensor]
    feed: Arrays
    is_real: Array  # which positions are no padding
    segments: Array  # the texts of each row, numbered from 1
    has_one_text: bool  # in each row


def read_test_set(decoder: Decoder, samples: Samples, size: int) -> Iterator[Texts]:
    """Yield the test set; packed rows, whose mask numbers their texts, are read as one text each."""
    generation = decoder.generation
    width = _token_ids(samples.batch([0]), generation).shape[1] * vocabulary_size(decoder)
    for batch in samples.batches(range(len(samples)), max(1, min(size, MAX_LOGITS // width))):
        ids = _token_ids(batch, generation)
        mask = batch[generation.mask].numpy().astype(np.int64) if generation.mask in batch else np.ones_like(ids)
        has_one_text = mask.shape == ids.shape and mask.max() <= 1
        feed = inputs_of(generation, ids, mask if has_one_text else np.ones_like(ids), empty_past(decoder, len(ids)))
        yield Texts(batch, feed, feed[generation.mask] == 1, mask, has_one_text)


def _token_ids(batch: Mapping[str, Tensor], generation: Generation) -> Array:
    check_ids(batch, generation.ids, generation.positions_limit, "test")
    ids: Array = batch[generation.ids].numpy()
    return ids.astype(np.int64)


def real_tokens(batch: Mapping[str, Tensor], generation: Generation) -> list[list[int]]:
    """Return the ids of each row without its padding, whose equal logits would leave nothing to compare."""
    ids = _token_ids(batch, generation)
    mask = batch[generation.mask].numpy() if generation.mask in batch else np.ones_like(ids)
    if mask.shape != ids.shape:
        mask = np.ones_like(ids)
    return [row[real != 0].tolist() or row.tolist() for row, real in zip(ids, mask, strict=True)]


def vocabulary_size(decoder: Decoder) -> int:
    """Return the size of the vocabulary: the logits of one position of the graph."""
    generation = decoder.generation
    token = np.zeros((1, 1), np.int64)
    return int(
        decoder.run(inputs_of(generation, token, token + 1, empty_past(decoder, 1)))[generation.logits].shape[-1]
    )
