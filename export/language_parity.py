"""Does the decoder say what torch says? Logits at shapes never traced, and greedy answers token by token."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn

from export.language_model import Cached
from export.parity import Arrays, Comparison, measure, together
from pipeline.contract.data import Samples
from pipeline.contract.errors import StageError
from pipeline.contract.golden import Answer, Decoder, empty_past, greedy, inputs_of
from pipeline.contract.settings.stages import Export
from pipeline.contract.signature import Generation

Array = np.ndarray[Any, Any]

TOKENS = 16  # of each greedy answer that is compared
_LOGITS = 1 << 24  # most numbers that are compared at once: a vocabulary is wide
_SHORT_SHAPES = 5  # of those below, the ones that cost little
_MOST_POSITIONS = 2048  # of the longest past that is compared; the model's own limit may be far beyond


@dataclass(frozen=True)
class Asked:
    """One run of the graph. `seen`: the real positions among its columns."""

    feed: Arrays
    seen: Array
    text: str
    judged: Arrays = field(default_factory=dict)  # what the model as it was judged answers, where that is known


@dataclass
class Greedy:
    """What came of comparing greedy answers, as parity.json has it."""

    prompts: int = 0
    tokens: int = 0
    ways: list[str] = field(default_factory=list)
    ties: int = 0  # answers that part where the two likeliest tokens are equal within tolerance


class TorchDecoder:
    """The judge: torch, with the same feeds as the graph, or from the beginning at every token."""

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
        """Without cache, padding or company."""
        ids = list(prompt)
        while len(ids) - len(prompt) < most and (ids[-1] not in self.generation.end or len(ids) == len(prompt)):
            logits = self.cached.model(input_ids=torch.tensor([ids]), use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
        return ids[len(prompt) :]


Judged = Callable[[Mapping[str, torch.Tensor]], Arrays]  # what evaluation saw, by output


def verify_language(
    model: nn.Module, decoder: Decoder, samples: Samples, config: Export, judged: Judged
) -> list[dict[str, Any]]:
    """The whole test set, answered as it was when it was judged, and shapes that were never traced."""
    judge = TorchDecoder(model, decoder.generation)
    asked = _test_set(decoder, samples, max(config.batch_sizes), judged)
    data = together(list(_compare(judge, decoder, asked, config)))
    shapes = _compare(judge, decoder, _never_traced(judge, decoder, samples), config)
    return [asdict(comparison) for comparison in (data, *shapes)]


def verify_random(
    model: nn.Module, decoder: Decoder, tolerance: Callable[[Arrays], Export], place: str
) -> dict[str, Any]:
    """Ids in an order no text has, at shapes that were never traced."""
    judge, known = TorchDecoder(model, decoder.generation), _vocabulary(decoder)
    ids = np.random.default_rng(0).integers(0, known, 64)
    asked = [
        replace(one, text=f"{one.text} ({place})") for one in islice(_of_shapes(judge, decoder, ids), _SHORT_SHAPES)
    ]
    parts = [found for one in asked for found in _compare(judge, decoder, iter([one]), tolerance(judge.run(one.feed)))]
    return {**asdict(together(parts)), "batches": len(parts)}


def language_feeds(model: nn.Module, decoder: Decoder, samples: Samples) -> Iterator[Arrays]:
    """What a fault is looked for with."""
    judge = TorchDecoder(model, decoder.generation)
    yield from (asked.feed for asked in _never_traced(judge, decoder, samples))
    yield from (asked.feed for asked in _test_set(decoder, samples, 4, lambda _: {}))


def verify_greedy(model: nn.Module, decoder: Decoder, prompts: Sequence[Sequence[int]], config: Export) -> Greedy:
    """Every prompt alone, all of them in one batch, and read in pieces: torch's tokens, all of them."""
    judge, found = TorchDecoder(model, decoder.generation), Greedy(prompts=len(prompts))
    most = min(TOKENS, decoder.generation.positions_limit - max(map(len, prompts)))
    expected = [judge.greedy(prompt, most) for prompt in prompts]
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


def _test_set(decoder: Decoder, samples: Samples, size: int, judged: Judged) -> Iterator[Asked]:
    """Packed rows tell by their mask which tokens belong together; they are read as one text each, by both."""
    one = decoder.generation
    width = _tokens(samples.batch([0]), one).shape[1] * _vocabulary(decoder)
    for batch in samples.batches(range(len(samples)), max(1, min(size, _LOGITS // width))):
        ids = _tokens(batch, one)
        mask = batch[one.mask].numpy().astype(np.int64) if one.mask in batch else np.ones_like(ids)
        plain = mask.shape == ids.shape and mask.max() <= 1
        feed = inputs_of(one, ids, mask if plain else np.ones_like(ids), empty_past(decoder, len(ids)))
        known = {name: array for name, array in judged(batch).items() if name == one.logits} if plain else {}
        yield Asked(feed, feed[one.mask] == 1, "the test set", known)


def _never_traced(judge: TorchDecoder, decoder: Decoder, samples: Samples) -> Iterator[Asked]:
    yield from _of_shapes(
        judge, decoder, _tokens(samples.batch(range(min(8, len(samples)))), decoder.generation).ravel()
    )


def _of_shapes(judge: TorchDecoder, decoder: Decoder, tokens: Array) -> Iterator[Asked]:
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
            read = judge.run(inputs_of(one, ids[:, :before], mask[:, :before], past))
            past = {cache.input: read[cache.output] for cache in one.caches}
        text = f"past {before}, sequence {sequence}, {padding} padded"
        yield Asked(inputs_of(one, ids[:, before:], mask, past), mask[:, before:] == 1, text)


def _compare(judge: TorchDecoder, decoder: Decoder, asked: Iterator[Asked], config: Export) -> Iterator[Comparison]:
    """Logits and the new past, at places that are no padding."""
    one = decoder.generation
    for each in asked:
        started = time.perf_counter()
        found = decoder.run(each.feed)
        seconds = time.perf_counter() - started
        expected = each.judged or judge.run(each.feed)
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
    """Asked of the graph: as many logits as one position has."""
    one = decoder.generation
    token = np.zeros((1, 1), np.int64)
    return int(decoder.run(inputs_of(one, token, token + 1, empty_past(decoder, 1)))[one.logits].shape[-1])


def _parts(way: str, prompt: Sequence[int], expected: Sequence[int], answer: Answer, config: Export) -> int:
    """1 where an answer parts from torch's at a tie, 0 where it does not part; raises where it parts without one."""
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
