"""Randomness as a function of (seed, step, rank), so that nothing about it needs saving."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch

from pipeline.spec.digest import digest_parts
from pipeline.spec.sections import Train


def be_deterministic(config: Train) -> None:
    """Ask torch for the same bits at every run, where the configuration wants that."""
    if config.elastic == "exact":
        torch.set_num_threads(1)  # kernels add up in another order with another number of threads
    if config.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
        # Filling fresh memory with NaN finds kernels that read what nobody wrote; it costs a pass over each tensor.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def seed_step(seed: int, step: int, rank: int) -> None:
    """Reset every generator a task may draw from before a step; step -1 is the making of the model."""
    value = _value(seed, step, rank)
    _seed_python(value)
    if step < 0:
        torch.manual_seed(value)  # of every kind of device, also of one that is not in use yet
        return
    torch.default_generator.manual_seed(value)  # manual_seed() notes a stack trace each time where CUDA sleeps
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(value)


@contextlib.contextmanager
def drawing(seed: int, step: int, part: int, rank: int) -> Iterator[None]:
    """Samples are loaded with generators of their own: in a worker or here, they draw the same numbers."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    value = _value(seed, step, rank, "data", part)
    _seed_python(value)
    torch.default_generator.manual_seed(value)  # not those of GPUs: no sample is drawn there
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def _value(*place: object) -> int:
    return int(digest_parts([str(part) for part in place])[:8], 16)


def _seed_python(value: int) -> None:
    random.seed(value)
    np.random.seed(value)  # the global generator is what augmentations use
