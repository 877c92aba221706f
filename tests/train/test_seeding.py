from __future__ import annotations

import random

import numpy as np
import torch

from train.seeding import seed_step


def drawn(seed: int, step: int, rank: int) -> tuple[float, float, float]:
    seed_step(seed, step, rank)
    return random.random(), float(np.random.random()), float(torch.rand(1))


def test_every_generator_draws_the_same_again_after_the_same_place() -> None:
    assert drawn(1, 2, 3) == drawn(1, 2, 3)


def test_seed_step_and_rank_each_draw_something_else() -> None:
    found = [drawn(*place) for place in ((1, 2, 3), (0, 2, 3), (1, 0, 3), (1, 2, 0), (12, 3, 0), (1, 23, 0))]
    for generator in zip(*found, strict=True):
        assert len(set(generator)) == len(found)
