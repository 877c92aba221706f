"""Digests of data: of a whole split, and of each sample's model inputs."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from pipeline.spec.data import Samples
from pipeline.spec.digest import digest_bytes

_BATCH = 512

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]


class Fingerprint:
    """Digest of every column of every sample in order, whatever batches they come in: the identity of a split."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, batch: Mapping[str, Tensor]) -> None:
        for row in _rows(batch, sorted(batch), prefixed=False):
            data = digest_bytes(row).encode()
            self._digest.update(len(data).to_bytes(8, "big") + data)

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def fingerprint(samples: Samples) -> str:
    found = Fingerprint()
    for batch in samples.batches(range(len(samples)), _BATCH):
        found.add(batch)
    return found.hexdigest()


def sample_digests(samples: Samples, columns: Sequence[str]) -> list[str]:
    """One digest per sample over the named columns; equal digests are exact duplicates."""
    found = []
    for batch in samples.batches(range(len(samples)), _BATCH):
        found += [digest_bytes(row) for row in _rows(batch, sorted(columns), prefixed=True)]
    return found


def batch_digests(batch: Mapping[str, Tensor], columns: Sequence[str]) -> np.ndarray[Any, np.dtype[np.bytes_]]:
    """The same, half of each: sixteen bytes a sample, so that those of millions fit in memory."""
    rows = _rows(batch, sorted(columns), prefixed=True)
    return np.frombuffer(b"".join(hashlib.sha256(row).digest()[:16] for row in rows), dtype="S16")


def _rows(batch: Mapping[str, Tensor], names: Sequence[str], prefixed: bool) -> Iterator[bytes]:
    """What is hashed of each sample, built for a whole batch at once: a call of torch for every value takes minutes."""
    parts = [part for name in names for part in _encode(name, batch[name], prefixed)]
    count = len(batch[names[0]])
    joined = np.concatenate([np.broadcast_to(part, (count, part.shape[-1])) for part in parts], axis=1)
    width, data = joined.shape[1], joined.tobytes()
    return (data[start : start + width] for start in range(0, count * width, width))


def _encode(name: str, column: Tensor, prefixed: bool) -> Iterator[Bytes]:
    value = column.detach().cpu().contiguous()
    shape = tuple(value.shape[1:])
    raw = value.reshape(-1).view(torch.uint8).reshape(len(value), math.prod(shape) * value.itemsize).numpy()
    for part in (f"{name}:{value.dtype}:{shape}:".encode(), raw):
        length = len(part) if isinstance(part, bytes) else part.shape[1]
        if prefixed:
            yield np.frombuffer(length.to_bytes(8, "big"), np.uint8)
        yield np.frombuffer(part, np.uint8) if isinstance(part, bytes) else part
