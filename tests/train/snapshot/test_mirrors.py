"""Real processes on make-believe machines: each machine is a folder of its own, which can be lost."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.spec.errors import PipelineError, StageError
from train.checkpoint import Progress, Saved, State
from train.group import Group
from train.snapshot import Mirrors, newest_snapshot

from ..together import together

IDENTITY = {"samples": 37}


def mirrors_of(group: Group, folder: Path, machines: str) -> Mirrors:
    own = folder / machines[group.rank.rank]
    own.mkdir(parents=True, exist_ok=True)
    return Mirrors(own, machines[group.rank.rank], IDENTITY, group, timeout_seconds=20)


def state(group: Group, step: int) -> State:
    tensors = {
        "weights.shared": torch.arange(1000.0) + step,
        "weights.small": torch.tensor([float(step)]),
        f"own.{group.rank.rank}.rest": torch.full((5,), 100.0 * group.rank.rank + step),
    }
    return State(Progress(step), tensors)


def made(mirrors: Mirrors, group: Group, *steps: int) -> list[int]:
    """What the first process did before each snapshot counted."""
    told: list[int] = []
    mirrors.begin("first", 0)
    for step in steps:
        mirrors.save(state(group, step), lambda step=step: told.append(step))  # type: ignore[misc]
    mirrors.background.wait()
    return told


def found(group: Group, folder: Path, machines: str, newest_usable: int = 99) -> Saved | None:
    """As processes look that have started anew."""
    group.gather(None)
    fresh = mirrors_of(group, folder, machines)
    return newest_snapshot(fresh, IDENTITY, group, lambda progress: progress.step <= newest_usable)


def numbers(saved: Saved | None, group: Group) -> tuple[int, float, float, float] | None:
    if saved is None:
        return None
    whole = saved.whole("")
    own = whole[f"own.{group.rank.rank}.rest"]
    return saved.progress.step, float(whole["weights.shared"][7]), float(whole["weights.small"][0]), float(own[4])


def lose(group: Group, folder: Path, *lost: str) -> None:
    group.gather(None)
    if group.rank.first:
        for machine in lost:
            shutil.rmtree(folder / machine)
    group.gather(None)


def save_lose_and_find(group: Group, folder: Path, machines: str, lost: str) -> Any:
    told = made(mirrors_of(group, folder, machines), group, 10, 20, 30)
    lose(group, folder, *lost)
    return told, numbers(found(group, folder, machines), group)


@pytest.mark.parametrize("lost", ["", "a"])
def test_the_newest_snapshot_outlives_any_machine(tmp_path: Path, lost: str) -> None:
    told = together(save_lose_and_find, 3, tmp_path, "abc", lost)
    for rank, (committed, read) in enumerate(told):
        assert committed == ([10, 20, 30] if rank == 0 else [])
        assert read == (30, 37.0, 30.0, 100.0 * rank + 30)
    assert {path.name for path in tmp_path.glob("*/step-*/*.safetensors")} == {f"{r}.safetensors" for r in range(3)}


def test_two_machines_at_once_take_parts_with_them(tmp_path: Path) -> None:
    assert [read for _, read in together(save_lose_and_find, 3, tmp_path, "abc", "ab")] == [None] * 3


def test_on_one_machine_its_own_memory_does(tmp_path: Path) -> None:
    told = together(save_lose_and_find, 2, tmp_path, "aa", "")
    assert [read for _, read in told] == [(30, 37.0, 30.0, 30.0), (30, 37.0, 30.0, 130.0)]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["step-00000020", "step-00000030"], "two in turn"


def damage_and_find(group: Group, folder: Path) -> Any:
    made(mirrors_of(group, folder, "ab"), group, 10, 20)
    if group.rank.first:
        for part in folder.glob("*/step-00000020/1.safetensors"):
            part.write_bytes(part.read_bytes()[:-1] + b"\xff")
    return numbers(found(group, folder, "ab"), group)


def test_a_damaged_part_that_nobody_else_has_leaves_the_one_before(tmp_path: Path) -> None:
    assert [read[0] for read in together(damage_and_find, 2, tmp_path)] == [10, 10]


def find_older(group: Group, folder: Path) -> Any:
    made(mirrors_of(group, folder, "ab"), group, 10, 20)
    return numbers(found(group, folder, "ab", newest_usable=15), group)


def test_a_snapshot_that_cannot_be_used_is_passed_over(tmp_path: Path) -> None:
    assert [read[0] for read in together(find_older, 2, tmp_path)] == [10, 10]


def begin_again(group: Group, folder: Path) -> Any:
    made(mirrors_of(group, folder, "ab"), group, 10, 20)
    fresh = mirrors_of(group, folder, "ab")
    fresh.begin("second", 10)
    fresh.save(state(group, 15), lambda: None)
    fresh.background.wait()
    return fresh.shelf.steps()


def test_snapshots_of_steps_that_are_made_again_are_forgotten(tmp_path: Path) -> None:
    assert together(begin_again, 2, tmp_path) == [[10, 15]] * 2


def fail_at_the_ledger(group: Group, folder: Path) -> Any:
    mirrors = mirrors_of(group, folder, "ab")
    made(mirrors, group, 10)

    def full() -> None:
        raise StageError("the ledger cannot be written")

    mirrors.save(state(group, 20), full)
    try:
        mirrors.save(state(group, 30), lambda: None)
    except PipelineError as error:
        return str(error), numbers(found(group, folder, "ab"), group)
    return None


def test_a_failure_is_raised_at_the_next_snapshot_on_all_and_the_last_one_stands(tmp_path: Path) -> None:
    for text, read in together(fail_at_the_ledger, 2, tmp_path):
        assert text == "the ledger cannot be written"
        assert read[0] == 10


def remove(group: Group, folder: Path) -> bool:
    mirrors = mirrors_of(group, folder, "ab")
    made(mirrors, group, 10)
    mirrors.remove()
    group.gather(None)
    return any(folder.iterdir())


def test_at_the_end_of_training_the_memory_is_given_back(tmp_path: Path) -> None:
    assert together(remove, 2, tmp_path) == [False, False]
