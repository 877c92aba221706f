from __future__ import annotations

import pytest

from pipeline.chaos.schedule import step_ends
from pipeline.chaos.small import small
from pipeline.spec.config import Config, parse_config
from pipeline.spec.errors import ConfigError

WHOLE = {"name": "x", "task": "task.py:T", "codec": "codec.py:C"}


def config(**train: object) -> Config:
    return parse_config({**WHOLE, "train": train}, source="test")


@pytest.mark.parametrize("kills", [20, 50, 100])
def test_a_large_split_is_cut_to_as_many_steps_as_there_are_kills_at_step_ends(kills: int) -> None:
    train = small(config(batch_size=64, epochs=300), 1_000_000, kills, []).train
    assert train.epochs * -(-train.samples // 64) == step_ends(kills) // 2 * 2
    assert train.epochs == 2
    assert train.samples % 64, "batches differ in size"


def test_a_small_split_is_gone_through_more_often() -> None:
    train = small(config(batch_size=64), 130, 50, []).train
    assert train.samples == 0
    assert train.epochs * 3 >= step_ends(50)


def test_a_few_kills_have_steps_before_and_after() -> None:
    train = small(config(batch_size=1), 1000, 1, []).train
    assert train.epochs * train.samples == 8


def test_every_step_is_saved_and_training_does_not_tire_of_starting_again() -> None:
    train = small(config(nodes=4, rendezvous="h:1", patience=2, balance="auto"), 1000, 10, []).train
    assert (train.checkpoint_every, train.nodes, train.patience, train.balance) == (1, 1, 0, "equal")
    assert train.restarts >= 100


def test_what_is_typed_comes_last() -> None:
    assert small(config(), 1000, 10, ["train.processes=3", "train.epochs=5"]).train.epochs == 5


@pytest.mark.parametrize("words", [["train.sync=parameter_server"], ["train.deterministic=false"]])
def test_trainings_that_end_otherwise_each_time_are_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="pipe chaos compares weights to the bit"):
        small(config(), 1000, 10, words)
