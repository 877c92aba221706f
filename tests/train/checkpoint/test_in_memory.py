"""Real processes on make-believe machines: each machine is a folder of its own, which can be lost."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeline.contract.errors import ConfigError, PipelineError, StageError
from pipeline.contract.run import Run
from train.checkpoint import in_memory
from train.checkpoint.format import Manifest, Written
from train.checkpoint.in_memory import (
    Mirrors,
    Neighbours,
    Shelf,
    candidates,
    check_room,
    hand_out,
    newest_snapshot,
    open_memory,
    senders,
    swap,
)
from train.checkpoint.load import Saved
from train.process_group import Group
from train.state import Progress, State

from ..together import together


@pytest.fixture
def run(tmp_path: Path) -> Run:
    found = Run(tmp_path / "runs" / "one")
    found.path.mkdir(parents=True)
    return found


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    (tmp_path / "memory").mkdir()
    return tmp_path / "memory"


def test_a_run_finds_its_folder_again_and_nobody_else_can_read_it(run: Run, memory: Path) -> None:
    folder = open_memory(run, memory)
    (folder / "kept").touch()
    assert open_memory(run, memory) == folder
    assert (folder / "kept").exists()
    assert folder.stat().st_mode & 0o777 == 0o700


def test_folders_of_runs_that_are_gone_or_over_are_removed(run: Run, memory: Path) -> None:
    gone, over = Run(run.runs / "gone"), Run(run.runs / "over")
    for other in (gone, over):
        other.path.mkdir()
    folders = [open_memory(other, memory) for other in (gone, over)]
    assert all(folder.is_dir() for folder in folders), "both may be under way"
    shutil.rmtree(gone.path)
    over.output("train").mkdir()
    own = open_memory(run, memory)
    assert list(memory.iterdir()) == [own]


def test_a_machine_without_memory_file_system_is_told(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train.snapshot=memory: this machine has no .*/none; use snapshot=none"):
        open_memory(run, tmp_path / "none")


def test_a_folder_that_somebody_else_put_there_is_refused(run: Run, memory: Path) -> None:
    folder = open_memory(run, memory)
    shutil.rmtree(folder)
    folder.symlink_to(run.path)
    with pytest.raises(ConfigError, match="belongs to somebody else"):
        open_memory(run, memory)


def test_too_little_memory_is_told_with_both_numbers_and_what_is_replaced_counts_as_free(memory: Path) -> None:
    check_room(memory, 1)
    free = shutil.disk_usage(memory).free
    with pytest.raises(ConfigError, match=r"train.snapshot=memory needs \d+ MB under .* MB are free; make it larger"):
        check_room(memory, 2 * free + (64 << 20))


def test_a_shelf_is_filled_up_and_emptied_by_steps(memory: Path) -> None:
    shelf = Shelf(memory)
    for step in (10, 20, 30):
        shelf.fill(step, "manifest.json", memoryview(b"%d" % step))
    shelf.fill(20, "0.safetensors", memoryview(b"part"))
    assert shelf.manifests() == {10: b"10", 20: b"20", 30: b"30"}
    assert bytes(shelf.read(20, "0.safetensors").numpy()) == b"part"
    shelf.forget_after(20)
    assert shelf.steps() == [10, 20]
    shelf.forget_before(20)
    assert shelf.steps() == [20]


def test_parts_without_a_manifest_are_no_snapshot(memory: Path) -> None:
    Shelf(memory).fill(20, "0.safetensors", memoryview(b"part"))
    assert Shelf(memory).manifests() == {}


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


def test_each_part_is_kept_on_the_next_machine_by_the_process_of_the_same_place() -> None:
    machines = ["a", "a", "b", "b", "c", "c"]
    assert [Neighbours(machines, 0).keeper(rank) for rank in range(6)] == [2, 3, 4, 5, 0, 1]
    assert Neighbours(machines, 2).wards == [0]


def test_where_machines_are_unequal_some_keep_several_parts() -> None:
    machines = ["a", "a", "a", "b"]
    assert [Neighbours(machines, 0).keeper(rank) for rank in range(4)] == [3, 3, 3, 0]
    assert Neighbours(machines, 3).wards == [0, 1, 2]
    assert Neighbours(machines, 0).wards == [3]
    assert Neighbours(machines, 1).wards == []


def test_one_machine_alone_has_nobody_to_keep_its_parts() -> None:
    alone = Neighbours(["a", "a"], 1)
    assert alone.keeper(0) is None
    assert alone.wards == []


def test_the_first_process_of_a_machine_leads_there() -> None:
    machines = ["a", "b", "a", "b"]
    assert [Neighbours(machines, rank).leads for rank in range(4)] == [True, True, False, False]
    assert Neighbours(machines, 2).here == [0, 2]
    assert Neighbours(machines, 2).leaders == [0, 1]


def of(rank: int) -> torch.Tensor:
    return torch.arange(10 + rank, dtype=torch.uint8) + 100 * rank


def swap_in_a_ring(group: Group) -> Any:
    """In pieces of four bytes, of which the last ones are shorter."""
    in_memory._PIECE_BYTES = 4
    rank, ward = group.rank.rank, (group.rank.rank + 2) % 3
    found = swap(of(rank), (rank + 1) % 3, {ward: 10 + ward}, dist.group.WORLD)
    return {sender: part.tolist() for sender, part in found.items()}


def test_everybody_gets_what_its_wards_send() -> None:
    assert together(swap_in_a_ring, 3) == [{ward: of(ward).tolist()} for ward in (2, 0, 1)]


def give_to_all(group: Group) -> list[int]:
    in_memory._PIECE_BYTES = 4
    mine = of(1) if group.rank.rank == 1 else None
    return hand_out(mine, 11, 1, dist.group.WORLD).tolist()


def test_what_one_has_is_handed_out_to_all() -> None:
    assert together(give_to_all, 2) == [of(1).tolist()] * 2


@pytest.mark.parametrize("mine", [torch.empty(0, dtype=torch.uint8), of(1)])
def test_a_process_alone_keeps_what_it_has(mine: torch.Tensor) -> None:
    assert swap(mine, None, {}, None) == {}
    assert hand_out(mine, len(mine), 0, None) is mine


def manifest(step: int, digest: str = "a", **more: Any) -> bytes:
    body = {"scaler": {}, "identity": IDENTITY, "world_size": 1, "files": (Written("0.safetensors", 1, digest),)}
    return Manifest(Progress(step), **{**body, **more}).encode()


def test_candidates_are_newest_first_and_those_of_other_data_are_none() -> None:
    strange = manifest(99, identity={"samples": 38})
    told = [{10: manifest(10), 20: manifest(20)}, {20: manifest(20), 30: manifest(30), 99: strange}]
    assert candidates(told, IDENTITY) == [manifest(30), manifest(20), manifest(10)]


def test_one_step_made_twice_in_different_parts_is_two_candidates() -> None:
    assert len(candidates([{20: manifest(20, "a")}, {20: manifest(20, "b")}], IDENTITY)) == 2


def test_a_damaged_manifest_is_passed_over_aloud(capsys: pytest.CaptureFixture[str]) -> None:
    flipped = manifest(20).replace(b'"step": 20', b'"step": 21')
    assert candidates([{20: flipped, 10: manifest(10)}], IDENTITY) == [manifest(10)]
    assert "warning: a snapshot is passed over: the digest of its manifest does not match" in capsys.readouterr().err


def test_what_a_machine_lacks_is_sent_by_the_first_that_has_it() -> None:
    names = ["0", "1", "2"]
    assert senders(names, {0: {"0", "1", "2"}, 2: {"0", "1", "2"}}) == {}
    assert senders(names, {0: {"0", "2"}, 2: {"1", "2"}}) == {"0": 0, "1": 2}


def test_what_nobody_has_makes_it_no_snapshot() -> None:
    assert senders(["0", "1"], {0: {"0"}, 2: {"0"}}) is None
