from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.system.errors import ConfigError, DataError
from pipeline.system.files import write_json
from train.batch_order import ORDER_FILE, ORDER_KEY, BatchOrder, Kind, check_order, read_order, write_order


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


GROUPS = np.repeat(np.arange(40), np.random.default_rng(1).integers(1, 9, 40))[::-1].copy()
LENGTHS = np.random.default_rng(2).integers(1, 500, 997)


def flat(batches: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(batches))


def epoch_of(order: BatchOrder, epoch: int) -> list[list[int]]:
    return [order.batch(epoch * order.steps_per_epoch + i).tolist() for i in range(order.steps_per_epoch)]


@pytest.mark.parametrize(("kind", "values", "batch_size"), [("groups", GROUPS, 16), ("lengths", LENGTHS, 8)])
def test_grouped_and_bucketed_epochs_use_each_sample_once_in_another_order(
    kind: Kind, values: np.ndarray[Any, Any], batch_size: int
) -> None:
    order = BatchOrder(len(values), batch_size, 3, kind, values)
    for epoch in range(3):
        batches = epoch_of(order, epoch)
        assert [order.size(epoch * len(batches) + i) for i in range(len(batches))] == list(map(len, batches))
        assert sorted(flat(batches)) == list(range(len(values)))
    assert epoch_of(order, 0) != epoch_of(order, 1)
    assert epoch_of(order, 0) == epoch_of(BatchOrder(len(values), batch_size, 3, kind, values.copy()), 0)


def test_group_is_in_one_batch_and_never_divided() -> None:
    order = BatchOrder(len(GROUPS), 16, 3, "groups", GROUPS)
    for step in range(5 * order.steps_per_epoch):
        groups, cuts = GROUPS[order.batch(step)], order.cuts(step)
        parts = [set(groups[start:stop].tolist()) for start, stop in itertools.pairwise(cuts)]
        assert all(len(part) == 1 for part in parts)
        assert len(set().union(*parts)) == len(parts) >= order.smallest_batch == 2
        assert sum(int((group == GROUPS).sum()) for (group,) in parts) == order.size(step)


def test_batches_have_similar_lengths_and_sizes() -> None:
    order = BatchOrder(len(LENGTHS), 8, 3, "lengths", LENGTHS)
    batches = epoch_of(order, 0)
    spread = np.mean([np.ptp(LENGTHS[batch]) for batch in batches])
    assert spread < 0.05 * np.mean([np.ptp(LENGTHS[batch]) for batch in epoch_of(BatchOrder(997, 8, 3), 0)])
    assert {len(batch) for batch in batches} == {7, 8}
    means = [LENGTHS[batch].mean() for batch in batches]
    assert abs(np.corrcoef(np.arange(len(means)), means)[0, 1]) < 0.2  # not from short to long


def test_weighted_draws_follow_the_weights() -> None:
    weights = np.array([0.0, 1.0, 3.0, 0.0] * 500)
    order = BatchOrder(2000, 64, 3, "weights", weights)
    counts = np.bincount(flat(epoch_of(order, 0) + epoch_of(order, 1)), minlength=2000)
    assert counts[weights == 0].sum() == 0
    assert counts.sum() == 4000
    assert counts[weights == 3].sum() == pytest.approx(3000, rel=0.05)


def test_a_stream_is_read_in_order() -> None:
    assert epoch_of(BatchOrder(10, 4, 3, "stream"), 1) == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]


def test_the_orders_of_a_task_are_the_same_on_every_platform() -> None:
    values = np.array([3, 1, 2, 3, 1, 2, 3, 1, 2, 3])
    found = [BatchOrder(10, 5, 1, kind, values).batch(0).tolist() for kind in ("weights", "groups", "lengths")]
    assert found == [[3, 8, 1, 0, 9], [1, 4, 7, 2, 5, 8], [2, 6, 0, 9, 3]]


def test_batch_too_small_for_the_groups_is_refused_naming_a_valid_size() -> None:
    def order(batch_size: int) -> BatchOrder:
        return BatchOrder(len(GROUPS), batch_size, 3, "groups", GROUPS)

    with pytest.raises(ConfigError, match=r"the largest group has 8 samples .* set train.batch_size=24 or more"):
        check_order(order(17), 3, "processes")
    check_order(order(24), 3, "processes")


def test_order_round_trips_through_its_file(tmp_path: Path) -> None:
    entry = write_order("groups", GROUPS, tmp_path)
    write_json(tmp_path / "data.json", {"splits": {"train": {"samples": len(GROUPS)}}, ORDER_KEY: entry})
    order = read_order(tmp_path, 16, seed=3, most=100)
    assert order.batch(7).tolist() == BatchOrder(100, 16, 3, "groups", GROUPS[:100]).batch(7).tolist()
    (tmp_path / ORDER_FILE).write_bytes(b"")
    with pytest.raises(DataError, match=r"order.npy: missing or changed since prepare"):
        read_order(tmp_path, 16, seed=3, most=0)


def test_first_samples_without_weight_are_refused(tmp_path: Path) -> None:
    entry = write_order("weights", np.array([0.0, 0, 1]), tmp_path)
    write_json(tmp_path / "data.json", {"splits": {"train": {"samples": 3}}, ORDER_KEY: entry})
    assert read_order(tmp_path, 2, seed=0, most=0).batch(0).tolist() == [2]
    with pytest.raises(ConfigError, match=r"train.max_samples=2: the weights of these samples are all 0"):
        read_order(tmp_path, 2, seed=0, most=2)


def test_a_run_without_a_recorded_order_is_shuffled(tmp_path: Path) -> None:
    write_json(tmp_path / "data.json", {"splits": {"train": {"samples": 37}}})
    assert read_order(tmp_path, 8, seed=5, most=0).batch(13).tolist() == BatchOrder(37, 8, 5).batch(13).tolist()
