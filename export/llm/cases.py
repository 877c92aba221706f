"""Cases of a language model: the test set, and other numbers of rows, lengths, paddings and pasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice

import numpy as np
from torch import Tensor

from export.checks.cases import RANDOM, SHAPES
from export.compare import Array, Arrays, Case
from export.llm.decoder import TorchDecoder
from export.llm.texts import MAX_LOGITS, read_test_set, real_tokens, vocabulary_size
from pipeline.contract.data import Samples
from pipeline.contract.golden import Decoder, empty_past, inputs_of

Evaluated = Callable[[Mapping[str, Tensor]], Arrays]  # returns the outputs of the evaluation, by name
_SHORT_SHAPES = 5  # the first shapes below, which cost little
_MAX_POSITIONS = 2048  # of the longest past that is compared; the model's limit may be far higher


def cases_of_test_set(
    reference: TorchDecoder, decoder: Decoder, samples: Samples, size: int, evaluated: Evaluated
) -> Iterator[Case]:
    """Yield the test set with the logits of the evaluation, or with torch's for rows of several texts."""
    logits = decoder.generation.logits
    for texts in read_test_set(decoder, samples, size):
        outputs = evaluated(texts.batch) if texts.has_one_text else {}
        expected = {logits: outputs[logits]} if logits in outputs else None
        yield _case("test set", "the test set", reference, texts.feed, expected)


def untraced_cases(reference: TorchDecoder, decoder: Decoder, samples: Samples) -> Iterator[Case]:
    """Yield shapes that were not traced, of the tokens of the test set."""
    rows = real_tokens(samples.batch(range(min(8, len(samples)))), decoder.generation)
    yield from _shape_cases(SHAPES, reference, decoder, np.concatenate([np.asarray(row, np.int64) for row in rows]))
    yield from _beyond_window(reference, decoder)


def random_cases(reference: TorchDecoder, decoder: Decoder) -> Iterator[Case]:
    """Yield a few of these shapes with random ids."""
    ids = np.random.default_rng(0).integers(0, vocabulary_size(decoder), 64)
    yield from islice(_shape_cases(RANDOM, reference, decoder, ids), _SHORT_SHAPES)


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
    yield _case(SHAPES, f"past {past_length}, random", reference, inputs_of(generation, ids, mask, past))


def _shape_cases(kind: str, reference: TorchDecoder, decoder: Decoder, tokens: Array) -> Iterator[Case]:
    """Yield cases of several numbers of rows, lengths and paddings, with a past computed by torch."""
    generation = decoder.generation
    longest = min(generation.positions_limit, _MAX_POSITIONS, max(16, MAX_LOGITS // vocabulary_size(decoder)))
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
        yield _case(kind, text, reference, inputs_of(generation, ids[:, past_length:], mask, past))


def _case(kind: str, text: str, reference: TorchDecoder, feed: Arrays, expected: Arrays | None = None) -> Case:
    """Return a case that compares logits and the new cache, except padding."""
    generation = reference.generation
    expected = expected or reference.run(feed)
    is_real = feed[generation.mask] == 1  # of the past, too
    masks = {generation.logits: is_real[:, -feed[generation.ids].shape[1] :]}
    for name in expected.keys() - {generation.logits}:  # [batch, heads, positions, width]
        masks[name] = np.broadcast_to(is_real[:, None], expected[name].shape[:3])
    return Case(kind, text, feed, expected, masks, generation.logits)
