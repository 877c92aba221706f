"""Export a language model as one graph with a cache, and compare it with torch.

The graph reads a prompt or one further token; its cache is an input and an output. The comparison covers logits at
untraced shapes, and greedy generation token by token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from export.parity import Arrays, Comparison, combine, measure
from export.to_onnx import ExportResult, write_onnx
from export.trace import ExportInput
from pipeline.contract.data import Samples
from pipeline.contract.golden import Answer, Decoder, empty_past, greedy, inputs_of
from pipeline.contract.prompting import (
    ANSWER_TOKENS,
    LEAST_POSITIONS,
    check_ids,
    empty_cache,
    positions_limit,
    read_prompting,
)
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
    layers = model(input_ids=ids, past_key_values=empty_cache(model), use_cache=True).past_key_values.layers
    latent = getattr(model.config, "kv_lora_rank", None) is not None  # DeepSeek caches what keys and values come from
    tensors = []
    for index, layer in enumerate(layers):
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


Array = np.ndarray[Any, Any]

_MAX_LOGITS = 1 << 24  # compared at once; a vocabulary is wide
_SHORT_SHAPES = 5  # the first shapes below, which cost little
_MAX_POSITIONS = 2048  # of the longest past that is compared; the model's limit may be far higher


@dataclass(frozen=True)
class Case:
    """One run of the graph. `is_real`: which of its positions are no padding."""

    feed: Arrays
    is_real: Array
    text: str
    evaluated_outputs: Arrays = field(default_factory=dict)  # outputs of the model as it was evaluated, if known
    batch: Mapping[str, Tensor] = field(default_factory=dict)  # the samples, for those of the test set
    segments: Array = field(default_factory=lambda: np.empty(0, np.int64))  # their texts, numbered from 1


@dataclass
class GreedyComparison:
    """Result of comparing greedy generation, for parity.json."""

    prompts: int = 0
    tokens: int = 0
    ways: list[str] = field(default_factory=list)
    ties: int = 0  # answers that differ where the two likeliest tokens are equal within tolerance


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


Evaluated = Callable[[Mapping[str, torch.Tensor]], Arrays]  # returns the outputs of the evaluation, by name


def verify_language(
    model: nn.Module, decoder: Decoder, samples: Samples, config: Export, evaluated: Evaluated
) -> list[dict[str, Any]]:
    """Compare on the whole test set, with the outputs of the evaluation, and at untraced shapes."""
    reference = TorchDecoder(model, decoder.generation)
    cases = read_test_set(decoder, samples, max(config.batch_sizes), evaluated)
    data = combine(list(_compare(reference, decoder, cases, config)))
    shapes = _compare(reference, decoder, _untraced_cases(reference, decoder, samples), config)
    return [asdict(comparison) for comparison in (data, *shapes)]


def verify_random(
    model: nn.Module, decoder: Decoder, tolerance: Callable[[Arrays], Export], setup: str
) -> dict[str, Any]:
    """Compare random ids at untraced shapes."""
    reference, vocabulary = TorchDecoder(model, decoder.generation), _vocabulary_size(decoder)
    ids = np.random.default_rng(0).integers(0, vocabulary, 64)
    cases = [
        replace(case, text=f"{case.text} ({setup})")
        for case in islice(_cases_of_shapes(reference, decoder, ids), _SHORT_SHAPES)
    ]
    parts = [
        comparison
        for case in cases
        for comparison in _compare(reference, decoder, iter([case]), tolerance(reference.run(case.feed)))
    ]
    return {**asdict(combine(parts)), "batches": len(parts)}


def language_feeds(model: nn.Module, decoder: Decoder, samples: Samples) -> Iterator[Arrays]:
    """Yield the inputs for the fault search."""
    reference = TorchDecoder(model, decoder.generation)
    yield from (cases.feed for cases in _untraced_cases(reference, decoder, samples))
    yield from (cases.feed for cases in read_test_set(decoder, samples, 4))


def verify_greedy(
    model: nn.Module, decoder: Decoder, prompts: Sequence[Sequence[int]], config: Export
) -> GreedyComparison:
    """Check that each prompt gets torch's tokens: run alone, in one batch, and read in chunks."""
    reference, result = TorchDecoder(model, decoder.generation), GreedyComparison(prompts=len(prompts))
    count = min(ANSWER_TOKENS, decoder.generation.positions_limit - max(map(len, prompts)))
    expected = [reference.greedy(prompt, count) for prompt in prompts]
    result.tokens = sum(map(len, expected))
    one_by_one = [greedy(decoder, [prompt], count)[0] for prompt in prompts]
    methods = {
        "each prompt alone": one_by_one,
        "all in one batch, padded on the left": greedy(decoder, prompts, count),
        "read three positions at a time": greedy(decoder, prompts, count, chunk=3),
    }
    for method, answers in methods.items():
        result.ways.append(method)
        result.ties += sum(
            _count_tie(method, *arguments, config) for arguments in zip(prompts, expected, answers, strict=True)
        )
    return result


def choose_prompts(requested: Sequence[Sequence[int]], samples: Samples, generation: Generation) -> list[list[int]]:
    """Return the task's prompts, or else beginnings of test samples of unequal lengths."""
    if requested:
        return [list(prompt) for prompt in requested]
    longest = generation.positions_limit - ANSWER_TOKENS
    count = min(4, len(samples))
    rows = _real_tokens(samples.batch(range(count)), generation)
    return [row[: max(1, min(3 + 4 * index, longest))] for index, row in enumerate(rows)]


def stable_answer(decoder: Decoder, prompt: Sequence[int], config: Export, error: float = 0.0) -> list[int]:
    """Return the greedy answer up to the first token that another machine's rounding, or `error`, could change."""
    count = min(ANSWER_TOKENS, decoder.generation.positions_limit - len(prompt))
    answer = greedy(decoder, [prompt], count)[0]
    is_tie = [
        lead <= max(_tie_margin(top, config), 2 * error) for lead, top in zip(answer.leads, answer.highest, strict=True)
    ]
    return answer.tokens[: is_tie.index(True)] if True in is_tie else answer.tokens


def _tie_margin(logit: float, config: Export) -> float:
    """Return the largest difference of two logits that is a tie: each may be off by the tolerance."""
    return 2 * (config.atol + config.rtol * abs(logit))


def _token_ids(batch: Mapping[str, torch.Tensor], generation: Generation) -> Array:
    check_ids(batch, generation.ids, generation.positions_limit, "test")
    ids: Array = batch[generation.ids].numpy()
    return ids.astype(np.int64)


def _real_tokens(batch: Mapping[str, torch.Tensor], generation: Generation) -> list[list[int]]:
    """Return the ids of each row without its padding, whose equal logits would leave nothing to compare."""
    ids = _token_ids(batch, generation)
    mask = batch[generation.mask].numpy() if generation.mask in batch else np.ones_like(ids)
    if mask.shape != ids.shape:
        mask = np.ones_like(ids)
    return [row[real != 0].tolist() or row.tolist() for row, real in zip(ids, mask, strict=True)]


def read_test_set(decoder: Decoder, samples: Samples, size: int, evaluated: Evaluated = lambda _: {}) -> Iterator[Case]:
    """Yield the test set; packed rows, whose mask numbers their texts, are read as one text each by both sides."""
    generation = decoder.generation
    width = _token_ids(samples.batch([0]), generation).shape[1] * _vocabulary_size(decoder)
    for batch in samples.batches(range(len(samples)), max(1, min(size, _MAX_LOGITS // width))):
        ids = _token_ids(batch, generation)
        mask = batch[generation.mask].numpy().astype(np.int64) if generation.mask in batch else np.ones_like(ids)
        has_one_text = mask.shape == ids.shape and mask.max() <= 1
        feed = inputs_of(generation, ids, mask if has_one_text else np.ones_like(ids), empty_past(decoder, len(ids)))
        evaluated_logits = (
            {name: array for name, array in evaluated(batch).items() if name == generation.logits}
            if has_one_text
            else {}
        )
        yield Case(feed, feed[generation.mask] == 1, "the test set", evaluated_logits, batch, mask)


def _beyond_window(reference: TorchDecoder, decoder: Decoder) -> Iterator[Case]:
    """Yield one more position after a past that is longer than the model's sliding window; the past is random."""
    generation, window = decoder.generation, getattr(reference.cached.model.config, "sliding_window", None)
    if not window or window + 2 > generation.positions_limit:
        return
    past_length, random = window + 1, np.random.default_rng(0)
    past = {
        name: random.normal(size=(2, array.shape[1], past_length, array.shape[3])).astype(np.float32)
        for name, array in empty_past(decoder, 2).items()
    }
    ids, mask = np.zeros((2, 1), np.int64), np.ones((2, past_length + 1), np.int64)
    mask[0, :2] = 0
    yield Case(inputs_of(generation, ids, mask, past), mask[:, past_length:] == 1, f"past {past_length}, random")


def _untraced_cases(reference: TorchDecoder, decoder: Decoder, samples: Samples) -> Iterator[Case]:
    rows = _real_tokens(samples.batch(range(min(8, len(samples)))), decoder.generation)
    yield from _cases_of_shapes(reference, decoder, np.concatenate([np.asarray(row, np.int64) for row in rows]))
    yield from _beyond_window(reference, decoder)


def _cases_of_shapes(reference: TorchDecoder, decoder: Decoder, tokens: Array) -> Iterator[Case]:
    """Yield cases of several numbers of rows, lengths and paddings, with a past computed by torch."""
    generation = decoder.generation
    longest = min(generation.positions_limit, _MAX_POSITIONS, max(16, _MAX_LOGITS // _vocabulary_size(decoder)))
    shapes = [
        (1, 0, 1, 0),
        (2, 0, 9, 2),
        (4, 6, 1, 3),
        (2, 1, 1, 0),
        (3, 4, 7, 4),
        (1, longest - 1, 1, 0),
        (1, 0, longest, 2),
    ]
    for rows, past_length, sequence, padding in shapes:
        total = past_length + sequence
        ids = np.resize(tokens, (rows, total))
        mask = np.ones_like(ids)
        mask[::2, : padding if rows > 1 or past_length == 0 else 0] = 0
        past = empty_past(decoder, rows)
        if past_length:
            outputs = reference.run(inputs_of(generation, ids[:, :past_length], mask[:, :past_length], past))
            past = {cache.input: outputs[cache.output] for cache in generation.caches}
        text = f"past {past_length}, sequence {sequence}, {padding} padded"
        yield Case(inputs_of(generation, ids[:, past_length:], mask, past), mask[:, past_length:] == 1, text)


def _compare(reference: TorchDecoder, decoder: Decoder, cases: Iterator[Case], config: Export) -> Iterator[Comparison]:
    """Compare logits and the new cache, except padding."""
    generation = decoder.generation
    for case in cases:
        started = time.perf_counter()
        actual = decoder.run(case.feed)
        seconds = time.perf_counter() - started
        expected = case.evaluated_outputs or reference.run(case.feed)
        is_real = case.feed[generation.mask] == 1
        pairs = {
            name: tuple(
                _select_positions(
                    arrays[name], case.is_real if name == generation.logits else is_real, name == generation.logits
                )
                for arrays in (expected, actual)
            )
            for name in expected
        }
        yield measure(pairs, config, len(case.is_real), seconds, case.text, generation.logits)


def _select_positions(array: Array, positions: Array, logits: bool) -> Array:
    """Select positions of logits [batch, sequence, vocabulary] or of a cache [batch, heads, positions, width]."""
    selected: Array = array[positions] if logits else array.swapaxes(1, 2)[positions]
    return selected


def _vocabulary_size(decoder: Decoder) -> int:
    """Return the size of the vocabulary: the logits of one position of the graph."""
    generation = decoder.generation
    token = np.zeros((1, 1), np.int64)
    return int(
        decoder.run(inputs_of(generation, token, token + 1, empty_past(decoder, 1)))[generation.logits].shape[-1]
    )


def _count_tie(method: str, prompt: Sequence[int], expected: Sequence[int], answer: Answer, config: Export) -> int:
    """Return 1 if an answer differs from torch's at a tie and 0 if it is equal; raise if it differs otherwise."""
    if answer.tokens == list(expected):
        return 0
    pairs = enumerate(zip(expected, answer.tokens, strict=False))
    difference = next(
        (position for position, pair in pairs if pair[0] != pair[1]), min(len(expected), len(answer.tokens))
    )
    last_position = min(difference, len(answer.tokens) - 1)
    if answer.leads[last_position] <= _tie_margin(answer.highest[last_position], config):
        return 1
    raise StageError(
        f"the ONNX file does not generate what torch does ({method}): for the prompt of {len(prompt)} ids "
        f"{list(prompt)[:8]}… torch's greedy answer is {list(expected)}, ONNX Runtime's {answer.tokens}"
    )
