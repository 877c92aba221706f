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
from export.to_onnx import Written, write_onnx
from export.trace import Traced
from pipeline.contract.data import Samples
from pipeline.contract.errors import StageError
from pipeline.contract.golden import Answer, Decoder, empty_past, greedy, inputs_of
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


Array = np.ndarray[Any, Any]

TOKENS = 16  # of each greedy answer that is compared
_LOGITS = 1 << 24  # most numbers that are compared at once: a vocabulary is wide
_SHORT_SHAPES = 5  # of those below, the ones that cost little
_MOST_POSITIONS = 2048  # of the longest past that is compared; the model's own limit may be far beyond


@dataclass(frozen=True)
class Case:
    """One run of the graph. `seen`: the real positions among its columns."""

    feed: Arrays
    seen: Array
    text: str
    evaluated: Arrays = field(default_factory=dict)  # outputs of the model as it was evaluated, if known


@dataclass
class Greedy:
    """Result of comparing greedy generation, for parity.json."""

    prompts: int = 0
    tokens: int = 0
    ways: list[str] = field(default_factory=list)
    ties: int = 0  # answers that differ where the two likeliest tokens are equal within tolerance


class TorchDecoder:
    """The reference: torch, with the same inputs as the graph, or recomputing from the start for every token."""

    def __init__(self, model: nn.Module, generation: Generation) -> None:
        self.cached, self.generation = Cached(model).eval(), generation

    @torch.no_grad()
    def run(self, feed: Mapping[str, Array]) -> Arrays:
        tensors = {name: torch.from_numpy(array) for name, array in feed.items()}
        one = self.generation
        past = [tensors[cache.input] for cache in one.caches]
        found = self.cached(tensors[one.ids], tensors[one.mask], tensors[one.positions], past)
        names = (one.logits, *(cache.output for cache in one.caches))
        return {name: tensor.numpy() for name, tensor in zip(names, found, strict=True)}

    @torch.no_grad()
    def greedy(self, prompt: Sequence[int], most: int) -> list[int]:
        """Generate without cache, padding or batching."""
        ids = list(prompt)
        while len(ids) - len(prompt) < most and (ids[-1] not in self.generation.end or len(ids) == len(prompt)):
            logits = self.cached.model(input_ids=torch.tensor([ids]), use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
        return ids[len(prompt) :]


Evaluated = Callable[[Mapping[str, torch.Tensor]], Arrays]  # what evaluation saw, by output


def verify_language(
    model: nn.Module, decoder: Decoder, samples: Samples, config: Export, evaluated: Evaluated
) -> list[dict[str, Any]]:
    """Compare on the whole test set, with the outputs of the evaluation, and at untraced shapes."""
    reference = TorchDecoder(model, decoder.generation)
    cases = _test_set(decoder, samples, max(config.batch_sizes), evaluated)
    data = combine(list(_compare(reference, decoder, cases, config)))
    shapes = _compare(reference, decoder, _never_traced(reference, decoder, samples), config)
    return [asdict(comparison) for comparison in (data, *shapes)]


def verify_random(
    model: nn.Module, decoder: Decoder, tolerance: Callable[[Arrays], Export], place: str
) -> dict[str, Any]:
    """Ids in an order no text has, at shapes that were never traced."""
    reference, known = TorchDecoder(model, decoder.generation), _vocabulary(decoder)
    ids = np.random.default_rng(0).integers(0, known, 64)
    cases = [
        replace(one, text=f"{one.text} ({place})") for one in islice(_of_shapes(reference, decoder, ids), _SHORT_SHAPES)
    ]
    parts = [
        found
        for one in cases
        for found in _compare(reference, decoder, iter([one]), tolerance(reference.run(one.feed)))
    ]
    return {**asdict(combine(parts)), "batches": len(parts)}


def language_feeds(model: nn.Module, decoder: Decoder, samples: Samples) -> Iterator[Arrays]:
    """What a fault is looked for with."""
    reference = TorchDecoder(model, decoder.generation)
    yield from (cases.feed for cases in _never_traced(reference, decoder, samples))
    yield from (cases.feed for cases in _test_set(decoder, samples, 4, lambda _: {}))


def verify_greedy(model: nn.Module, decoder: Decoder, prompts: Sequence[Sequence[int]], config: Export) -> Greedy:
    """Every prompt alone, all of them in one batch, and read in pieces: torch's tokens, all of them."""
    reference, found = TorchDecoder(model, decoder.generation), Greedy(prompts=len(prompts))
    most = min(TOKENS, decoder.generation.positions_limit - max(map(len, prompts)))
    expected = [reference.greedy(prompt, most) for prompt in prompts]
    found.tokens = sum(map(len, expected))
    alone = [greedy(decoder, [prompt], most)[0] for prompt in prompts]
    ways = {
        "each prompt alone": alone,
        "all in one batch, padded on the left": greedy(decoder, prompts, most),
        "read three positions at a time": greedy(decoder, prompts, most, chunk=3),
    }
    for way, answers in ways.items():
        found.ways.append(way)
        found.ties += sum(_parts(way, *pair, config) for pair in zip(prompts, expected, answers, strict=True))
    return found


def prompts_of(given: Sequence[Sequence[int]], samples: Samples, generation: Generation) -> list[list[int]]:
    """The task's own, or beginnings of test samples, of unequal lengths."""
    room = generation.positions_limit - TOKENS
    if given:
        if over := next((prompt for prompt in given if not 0 < len(prompt) <= room), None):
            raise StageError(f"prompting() has a prompt of {len(over)} ids; give 1 to {room}, so that an answer fits")
        return [list(prompt) for prompt in given]
    count = min(4, len(samples))
    rows = _tokens(samples.batch(range(count)), generation).tolist()
    return [row[: max(1, min(3 + 4 * index, room))] for index, row in enumerate(rows)]


def settled(decoder: Decoder, prompt: Sequence[int], config: Export) -> list[int]:
    """A greedy answer as far as no other machine's rounding can change it."""
    most = min(TOKENS, decoder.generation.positions_limit - len(prompt))
    answer = greedy(decoder, [prompt], most)[0]
    close = [lead <= _slack(top, config) for lead, top in zip(answer.leads, answer.highest, strict=True)]
    return answer.tokens[: close.index(True)] if True in close else answer.tokens


def _slack(logit: float, config: Export) -> float:
    """How far two logits may be apart and still be a tie: both may be off by the tolerance."""
    return 2 * (config.atol + config.rtol * abs(logit))


def _tokens(batch: Mapping[str, torch.Tensor], generation: Generation) -> Array:
    if generation.ids not in batch:
        raise StageError(
            f"the test data of a language model need a column `{generation.ids}`; found {', '.join(batch)}"
        )
    ids: Array = batch[generation.ids].numpy()
    if ids.ndim != 2 or ids.shape[1] > generation.positions_limit:
        raise StageError(
            f"the test data's `{generation.ids}` has shape {list(ids.shape)}, the model takes [batch, sequence] of "
            f"{generation.positions_limit} positions at most"
        )
    return ids.astype(np.int64)


def _test_set(decoder: Decoder, samples: Samples, size: int, evaluated: Evaluated) -> Iterator[Case]:
    """Yield the test set; packed rows, whose mask numbers their texts, are read as one text each by both sides."""
    one = decoder.generation
    width = _tokens(samples.batch([0]), one).shape[1] * _vocabulary(decoder)
    for batch in samples.batches(range(len(samples)), max(1, min(size, _LOGITS // width))):
        ids = _tokens(batch, one)
        mask = batch[one.mask].numpy().astype(np.int64) if one.mask in batch else np.ones_like(ids)
        plain = mask.shape == ids.shape and mask.max() <= 1
        feed = inputs_of(one, ids, mask if plain else np.ones_like(ids), empty_past(decoder, len(ids)))
        known = {name: array for name, array in evaluated(batch).items() if name == one.logits} if plain else {}
        yield Case(feed, feed[one.mask] == 1, "the test set", known)


def _never_traced(reference: TorchDecoder, decoder: Decoder, samples: Samples) -> Iterator[Case]:
    yield from _of_shapes(
        reference, decoder, _tokens(samples.batch(range(min(8, len(samples)))), decoder.generation).ravel()
    )


def _of_shapes(reference: TorchDecoder, decoder: Decoder, tokens: Array) -> Iterator[Case]:
    """Rows, past, sequence and padding, with a past that torch has read."""
    one = decoder.generation
    longest = min(one.positions_limit, _MOST_POSITIONS, max(16, _LOGITS // _vocabulary(decoder)))
    shapes = [
        (1, 0, 1, 0),
        (2, 0, 9, 2),
        (4, 6, 1, 3),
        (2, 1, 1, 0),
        (3, 4, 7, 4),
        (1, longest - 1, 1, 0),
        (1, 0, longest, 2),
    ]
    for rows, before, sequence, padding in shapes:
        total = before + sequence
        ids = np.resize(tokens, (rows, total))
        mask = np.ones_like(ids)
        mask[::2, : padding if rows > 1 or before == 0 else 0] = 0
        past = empty_past(decoder, rows)
        if before:
            read = reference.run(inputs_of(one, ids[:, :before], mask[:, :before], past))
            past = {cache.input: read[cache.output] for cache in one.caches}
        text = f"past {before}, sequence {sequence}, {padding} padded"
        yield Case(inputs_of(one, ids[:, before:], mask, past), mask[:, before:] == 1, text)


def _compare(reference: TorchDecoder, decoder: Decoder, cases: Iterator[Case], config: Export) -> Iterator[Comparison]:
    """Compare logits and the new cache, except padding."""
    one = decoder.generation
    for each in cases:
        started = time.perf_counter()
        found = decoder.run(each.feed)
        seconds = time.perf_counter() - started
        expected = each.evaluated or reference.run(each.feed)
        seen = each.feed[one.mask] == 1
        pairs = {
            name: tuple(
                _seen(arrays[name], each.seen if name == one.logits else seen, name == one.logits)
                for arrays in (expected, found)
            )
            for name in expected
        }
        yield measure(pairs, config, len(each.seen), seconds, each.text, one.logits)


def _seen(array: Array, places: Array, logits: bool) -> Array:
    """Logits are [batch, sequence, vocabulary]; a cache has its positions on the third axis."""
    picked: Array = array[places] if logits else array.swapaxes(1, 2)[places]
    return picked


def _vocabulary(decoder: Decoder) -> int:
    """Return the size of the vocabulary: the logits of one position of the graph."""
    one = decoder.generation
    token = np.zeros((1, 1), np.int64)
    return int(decoder.run(inputs_of(one, token, token + 1, empty_past(decoder, 1)))[one.logits].shape[-1])


def _parts(way: str, prompt: Sequence[int], expected: Sequence[int], answer: Answer, config: Export) -> int:
    """Return 1 if an answer differs from torch's at a tie and 0 if it is equal; raise if it differs otherwise."""
    if answer.tokens == list(expected):
        return 0
    pairs = enumerate(zip(expected, answer.tokens, strict=False))
    place = next((at for at, pair in pairs if pair[0] != pair[1]), min(len(expected), len(answer.tokens)))
    at = min(place, len(answer.tokens) - 1)
    if answer.leads[at] <= _slack(answer.highest[at], config):
        return 1
    raise StageError(
        f"the ONNX file does not generate what torch does ({way}): for the prompt of {len(prompt)} ids "
        f"{list(prompt)[:8]}… torch's greedy answer is {list(expected)}, ONNX Runtime's {answer.tokens}"
    )
