from __future__ import annotations

import numpy as np
import pytest

from train.batch_order import BatchOrder


@pytest.mark.parametrize(("samples", "batch_size"), [(37, 8), (8, 8), (9, 8), (5, 100), (64, 1), (1, 1), (1437, 64)])
def test_every_sample_comes_exactly_once_an_epoch(samples: int, batch_size: int) -> None:
    order = BatchOrder(samples, batch_size, seed=3)
    for epoch in range(2):
        first = epoch * order.steps_per_epoch
        batches = [order.batch(first + i) for i in range(order.steps_per_epoch)]
        assert sorted(np.concatenate(batches).tolist()) == list(range(samples))


@pytest.mark.parametrize(("samples", "batch_size"), [(37, 8), (9, 8), (1437, 64), (1000, 999)])
def test_batch_sizes_of_an_epoch_differ_by_one_at_most(samples: int, batch_size: int) -> None:
    order = BatchOrder(samples, batch_size, seed=0)
    sizes = [len(order.batch(i)) for i in range(order.steps_per_epoch)]
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= batch_size
    assert min(sizes) == order.smallest_batch


def test_batch_depends_on_seed_and_step_only() -> None:
    expected = BatchOrder(37, 8, seed=5).batch(13).tolist()
    order = BatchOrder(37, 8, seed=5)
    for step in (99, 0, 50, 7):
        order.batch(step)
    assert order.batch(13).tolist() == expected


def test_epochs_and_seeds_are_shuffled_apart() -> None:
    order, other = BatchOrder(37, 37, seed=0), BatchOrder(37, 37, seed=1)
    assert len({tuple(batch) for batch in (order.batch(0), order.batch(1), other.batch(0), other.batch(1))}) == 4


def test_the_order_is_the_same_on_every_platform() -> None:
    assert BatchOrder(10, 5, seed=1).batch(0).tolist() == [
        6,
        0,
        7,
        9,
        4,
    ]  # written down once: a change here breaks every resume


def test_the_largest_seed_that_a_configuration_takes_works() -> None:
    assert len(BatchOrder(10, 5, seed=2**63 - 1).batch(10**6)) == 5


def test_the_epoch_of_a_step_changes_with_its_first_batch() -> None:
    order = BatchOrder(37, 8, seed=0)
    assert [order.epoch_of(step) for step in (0, 4, 5, 9, 10)] == [0, 0, 1, 1, 2]
