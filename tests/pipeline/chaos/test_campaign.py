from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import get_args

import pytest

from pipeline.chaos.campaign import KILL_KINDS, count_step_kills, damage_storage, reduced_config, schedule
from pipeline.contract.chaos import Fault, Kill
from pipeline.contract.config import Config, parse_config
from pipeline.contract.run import Run, all_runs
from pipeline.system.errors import ConfigError


def test_schedule_depends_on_the_seed() -> None:
    assert schedule(50, 7, 18, 2) == schedule(50, 7, 18, 2)
    assert schedule(50, 7, 18, 2) != schedule(50, 8, 18, 2)


@pytest.mark.parametrize(("kills", "steps", "processes"), [(1, 8, 1), (5, 8, 1), (20, 9, 2), (50, 18, 3), (100, 40, 2)])
def test_schedule_has_the_requested_kills_in_order(kills: int, steps: int, processes: int) -> None:
    found = schedule(kills, 7, steps, processes)
    assert len(found) == kills
    assert [kill.step for kill in found] == sorted(kill.step for kill in found)
    assert all(1 <= kill.step <= steps and 0 <= kill.rank < processes and 0 <= kill.share < 1 for kill in found)


def test_schedule_covers_every_place_and_victim() -> None:
    found = Counter(schedule(len(KILL_KINDS), 7, 18, 2))
    places = Counter((kill.place, kill.who) for kill in found)
    assert places.keys() == {
        ("step", "worker"), ("write", "worker"), ("rename", "worker"), ("renamed", "worker"), ("ledger", "worker"),
        ("moment", "worker"), ("moment", "launcher"), ("moment", "pipe"), ("moment", "server"),
        ("start", "worker"),
    }  # fmt: skip
    assert {kill.rank for kill in found if (kill.place, kill.who) == ("moment", "worker")} == {0, 1}
    assert {kill.fault for kill in found} == set(get_args(Fault))


def test_pauses_and_clocks_differ() -> None:
    found = schedule(3 * len(KILL_KINDS), 7, 40, 2)
    assert {kill.seconds for kill in found if kill.fault == "pause"} == {5, 30, 90}
    assert {kill.seconds for kill in found if kill.fault == "clock"} == {3600, -3600}


def files_after(folder: Path, fault: Fault, share: float = 0.0) -> dict[str, bytes]:
    """Return the files that the fault changed, of a run whose best checkpoint is the older one."""
    run = Run(folder / "run")
    kill = Kill(place="moment", who="pipe", step=1, share=share, fault=fault)
    damage_storage(run, kill)  # nothing is there yet
    for name in ("step-00000001", "step-00000002"):
        (checkpoint := run.partial("train") / "checkpoints" / name).mkdir(parents=True)
        (checkpoint / "0.safetensors").write_bytes(b"12345678")
        (checkpoint / "manifest.json").write_text('{"content": {"progress": {"best_step": 1}}}')
    (run.path / "logs" / "positions").mkdir(parents=True)
    for name in ("run.json", "train.partial/ledger.jsonl", "train.partial/metrics.jsonl", "logs/positions/0.json"):
        (run.path / name).write_bytes(b"{}")
    before = {path: path.read_bytes() for path in folder.rglob("*.*") if path.is_file()}
    damage_storage(run, kill)
    after = {path: path.read_bytes() for path in folder.rglob("*.*") if path.is_file()}
    return {path.relative_to(folder).as_posix(): after[path] for path in after if after[path] != before.get(path)}


@pytest.mark.parametrize(
    ("fault", "step", "content"), [("truncated", 2, b"1234"), ("flipped", 2, b"1234567\xc7"), ("best", 1, bytes(8))]
)
def test_only_a_shard_of_the_newest_or_best_checkpoint_is_damaged(
    tmp_path: Path, fault: Fault, step: int, content: bytes
) -> None:
    damaged = files_after(tmp_path, fault)
    assert damaged == {f"run/train.partial/checkpoints/step-0000000{step}/0.safetensors": content}


def test_zeroed_file_is_one_that_training_can_do_without(tmp_path: Path) -> None:
    damaged = [files_after(tmp_path / str(i), "zeroed", share=i / 20) for i in range(20)]
    assert all(list(files.values()) == [bytes(2)] for files in damaged)
    assert {name for files in damaged for name in files} == {
        "run/train.partial/metrics.jsonl", "run/logs/positions/0.json",
    }  # fmt: skip


def test_unreadable_run_is_another_one(tmp_path: Path) -> None:
    assert files_after(tmp_path, "unreadable") == {}, "the run itself is unchanged"
    newest, run = all_runs(tmp_path)
    assert (run.id, (newest.path / "run.json").read_bytes()) == ("run", b"")


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_step_ends_with_a_kill_if_there_are_enough(seed: int) -> None:
    steps = count_step_kills(50)
    ends = [kill for kill in schedule(50, seed, steps, 2) if kill.place == "step" and kill.fault == "kill"]
    assert [kill.step for kill in ends] == list(range(1, steps + 1))
    assert {kill.rank for kill in ends} == {0, 1}


def test_kill_from_outside_leaves_steps_to_train() -> None:
    outside = [kill for kill in schedule(200, 7, 18, 2) if kill.place == "moment"]
    assert all(kill.step < kill.hold <= 18 for kill in outside)


WHOLE = {"name": "x", "task": "task.py:T", "codec": "codec.py:C"}


def config(**train: object) -> Config:
    return parse_config({**WHOLE, "train": train}, source="test")


@pytest.mark.parametrize("kills", [20, 50, 100])
def test_large_split_is_cut_to_the_number_of_step_kills(kills: int) -> None:
    train = reduced_config(config(batch_size=64, epochs=300), 1_000_000, kills, []).train
    assert train.epochs * -(-train.max_samples // 64) == count_step_kills(kills) // 2 * 2
    assert train.epochs == 2
    assert train.max_samples % 64, "batches differ in size"


def test_small_split_is_repeated_and_few_kills_have_steps_before_and_after() -> None:
    train = reduced_config(config(batch_size=64), 130, 50, []).train
    assert train.max_samples == 0
    assert train.epochs * 3 >= count_step_kills(50)
    train = reduced_config(config(batch_size=1), 1000, 1, []).train
    assert train.epochs * train.max_samples == 8
    assert reduced_config(config(), 1000, 10, ["train.processes=3", "train.epochs=5"]).train.epochs == 5, "comes last"


def test_reduced_training_saves_every_step_and_restarts_often() -> None:
    train = reduced_config(
        config(nodes=4, rendezvous="h:1", early_stopping_patience=2, balance="auto"), 1000, 10, []
    ).train
    assert (train.checkpoint_every, train.nodes, train.early_stopping_patience, train.balance) == (1, 1, 0, "equal")
    assert train.restarts >= 100


@pytest.mark.parametrize("words", [["train.strategy=parameter_server"], ["train.deterministic=false"]])
def test_nondeterministic_training_is_rejected(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="pipe chaos compares weights to the bit"):
        reduced_config(config(), 1000, 10, words)
