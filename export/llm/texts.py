"""Read the test set as inputs of the graph of a language model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from export.compare import Array, Arrays
from pipeline.contract.data import Samples
from pipeline.contract.golden import Decoder, empty_past, inputs_of
from pipeline.contract.prompting import check_ids
from pipeline.contract.signature import Generation

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
