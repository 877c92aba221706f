"""Randomness as a function of (seed, step, rank), so that nothing about it needs saving."""

from __future__ import annotations

import random

import numpy as np
import torch

from pipeline.spec.digest import digest_parts


def seed_step(seed: int, step: int, rank: int) -> None:
    """Reset every generator a task may draw from before a step; step -1 is the making of the model."""
    value = int(digest_parts([str(seed), str(step), str(rank)])[:8], 16)
    random.seed(value)
    np.random.seed(value)  # the global generator is what augmentations use
    torch.manual_seed(value)
