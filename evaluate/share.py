"""How processes share the test split: whole batches of one fixed grid each, gathered on the first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from evaluate.columns import Columns
from evaluate.prediction import join
from pipeline.spec.errors import ConfigError
from pipeline.spec.rank import Rank


def share_of(rank: Rank, samples: int, batch_size: int) -> range:
    """The sample indices of this rank: contiguous, each sample in exactly one share, none padded.

    Batches are dealt, not samples: a batch then has the same members however many processes there are,
    and so the same rounding. A rank may get none.
    """
    batches = rank.slice_of(-(-samples // batch_size))
    return range(min(batches.start * batch_size, samples), min(batches.stop * batch_size, samples))


@contextmanager
def group(rank: Rank, timeout_seconds: int) -> Iterator[None]:
    """A gloo group around the work of several processes; one alone needs none."""
    if rank.world_size == 1:
        yield
        return
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_seconds))
    try:
        yield
    finally:
        dist.destroy_process_group()


def gather(rank: Rank, columns: Columns) -> Columns | None:
    """Every share in order of the samples, on the first rank; None on the others."""
    if rank.world_size == 1:
        return columns
    parts: list[Any] | None = [None] * rank.world_size if rank.first else None
    dist.gather_object(columns, parts, dst=0)
    return None if parts is None else join(parts)


def device_of(wanted: str, rank: Rank) -> torch.device:
    """Where the candidate runs; `cuda` that is not there is an error, never a silent CPU."""
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ConfigError("train.device is cuda, but torch sees no GPU here; fix the driver or set train.device=auto")
    if wanted == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", rank.local_rank % torch.cuda.device_count())
