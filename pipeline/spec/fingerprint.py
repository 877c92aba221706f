"""Digests of data: of a whole split, and of each sample's model inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from pipeline.spec.data import Samples
from pipeline.spec.digest import digest_bytes, digest_parts

_BATCH = 512


def fingerprint(samples: Samples) -> str:
    """Digest of every column of every sample in order: the identity of a split."""
    return digest_parts(_parts(samples))


def sample_digests(samples: Samples, columns: Sequence[str]) -> list[str]:
    """One digest per sample over the named columns; equal digests are exact duplicates."""
    found = []
    for batch in samples.batches(range(len(samples)), _BATCH):
        rows = {name: batch[name] for name in columns}
        count = len(next(iter(rows.values())))
        found += [digest_parts(_encode({name: row[i] for name, row in rows.items()})) for i in range(count)]
    return found


def _parts(samples: Samples) -> Iterator[bytes]:
    """Sample by sample, so that the digest does not depend on how the split was read."""
    for batch in samples.batches(range(len(samples)), _BATCH):
        count = len(next(iter(batch.values())))
        for i in range(count):
            yield digest_bytes(b"".join(_encode({name: column[i] for name, column in batch.items()}))).encode()


def _encode(row: Mapping[str, Tensor]) -> Iterator[bytes]:
    for name in sorted(row):
        value = row[name].detach().cpu().contiguous()
        yield f"{name}:{value.dtype}:{tuple(value.shape)}:".encode()
        yield value.reshape(-1).view(torch.uint8).numpy().tobytes()
