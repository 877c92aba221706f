"""Snapshots in memory, with real processes on simulated machines: each machine is a folder, which can be lost.

The processes are started once per number of machines and run all scenarios, each in its own folder.
"""

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
from train.checkpoint.format import FileRecord, Manifest
from train.checkpoint.in_memory import (
    BackupPlan,
    MemorySnapshots,
    MemoryStorage,
    broadcast_bytes,
    check_free_memory,
    choose_senders,
    exchange_copies,
    find_newest_snapshot,
    open_snapshot_folder,
    sorted_candidates,
)
from train.checkpoint.load import SavedCheckpoint
from train.process_group import ProcessGroup
from train.state import Progress, State

from ..distributed import run_distributed

IDENTITY = {"samples": 37}
Values = tuple[int, float, float, float]


def make_snapshots(group: ProcessGroup, folder: Path, machines: str) -> MemorySnapshots:
    own = folder / machines[group.rank.rank]
    own.mkdir(parents=True, exist_ok=True)
    return MemorySnapshots(own, machines[group.rank.rank], IDENTITY, group, timeout_seconds=20)


def state(group: ProcessGroup, step: int) -> State:
    tensors = {
        "weights.shared": torch.arange(1000.0) + step,
        "weights.small": torch.tensor([float(step)]),
        f"own.{group.rank.rank}.rest": torch.full((5,), 100.0 * group.rank.rank + step),
    }
    return State(Progress(step), tensors)


def save(snapshots: MemorySnapshots, group: ProcessGroup, *steps: int) -> list[int]:
    """Save snapshots of these steps; return those for which this process called `before_commit`."""
    called: list[int] = []
    snapshots.begin("first", 0)
    for step in steps:
        snapshots.save(state(group, step), lambda step=step: called.append(step))  # type: ignore[misc]
    snapshots.background.wait()
    return called


def restart(group: ProcessGroup, folder: Path, machines: str, newest_usable: int = 99) -> Values | None:
    """Return values of the snapshot that restarted processes find."""
    group.gather(None)
    fresh = make_snapshots(group, folder, machines)
    saved = find_newest_snapshot(fresh, IDENTITY, group, lambda progress: progress.step <= newest_usable)
    return None if saved is None else values(saved, group)


def values(saved: SavedCheckpoint, group: ProcessGroup) -> Values:
    tensors = saved.read_all("")
    own = tensors[f"own.{group.rank.rank}.rest"]
    return saved.progress.step, float(tensors["weights.shared"][7]), float(tensors["weights.small"][0]), float(own[4])


def lose_machines(group: ProcessGroup, folder: Path, machines: str, lost: str) -> tuple[list[int], Values | None]:
    called = save(make_snapshots(group, folder, machines), group, 10, 20, 30)
    group.gather(None)
    if group.rank.first:
        for machine in lost:
            shutil.rmtree(folder / machine)
    group.gather(None)
    return called, restart(group, folder, machines)


def damage_a_shard(group: ProcessGroup, folder: Path) -> Values | None:
    save(make_snapshots(group, folder, "ab"), group, 10, 20)
    if group.rank.first:
        for shard in folder.glob("*/step-00000020/1.safetensors"):
            shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    return restart(group, folder, "ab")


def refuse_the_newest(group: ProcessGroup, folder: Path) -> Values | None:
    save(make_snapshots(group, folder, "ab"), group, 10, 20)
    return restart(group, folder, "ab", newest_usable=15)


def begin_again(group: ProcessGroup, folder: Path) -> list[int]:
    save(make_snapshots(group, folder, "ab"), group, 10, 20)
    fresh = make_snapshots(group, folder, "ab")
    fresh.begin("second", 10)
    fresh.save(state(group, 15), lambda: None)
    fresh.background.wait()
    return fresh.storage.steps()


def fail_before_commit(group: ProcessGroup, folder: Path) -> tuple[str, Values | None]:
    snapshots = make_snapshots(group, folder, "ab")
    save(snapshots, group, 10)

    def fail() -> None:
        raise StageError("the ledger cannot be written")

    snapshots.save(state(group, 20), fail)
    with pytest.raises(PipelineError) as caught:
        snapshots.save(state(group, 30), lambda: None)
    return str(caught.value), restart(group, folder, "ab")


def remove_all(group: ProcessGroup, folder: Path) -> bool:
    snapshots = make_snapshots(group, folder, "ab")
    save(snapshots, group, 10)
    snapshots.remove()
    group.gather(None)
    return any(folder.iterdir())


def shard_of(rank: int) -> torch.Tensor:
    return torch.arange(10 + rank, dtype=torch.uint8) + 100 * rank


def exchange_in_a_ring(group: ProcessGroup) -> dict[int, list[int]]:
    rank, protected = group.rank.rank, (group.rank.rank + 2) % 3
    received = exchange_copies(shard_of(rank), (rank + 1) % 3, {protected: 10 + protected}, dist.group.WORLD)
    return {sender: shard.tolist() for sender, shard in received.items()}


def broadcast_from_second(group: ProcessGroup) -> list[int]:
    return broadcast_bytes(shard_of(1) if group.rank.rank == 1 else None, 11, 1, dist.group.WORLD).tolist()


def run_on_three_machines(group: ProcessGroup, folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {
        lost: lose_machines(group, folder / f"lost-{lost}", "abc", lost) for lost in ("", "a", "ab")
    }
    in_memory.MESSAGE_BYTES = 4  # so that the last messages are shorter
    return results | {"ring": exchange_in_a_ring(group)}


def run_on_two_processes(group: ProcessGroup, folder: Path) -> dict[str, Any]:
    results = {
        "one machine": lose_machines(group, folder / "one-machine", "aa", ""),
        "damaged": damage_a_shard(group, folder / "damaged"),
        "unusable": refuse_the_newest(group, folder / "unusable"),
        "again": begin_again(group, folder / "again"),
        "failed": fail_before_commit(group, folder / "failed"),
        "removed": remove_all(group, folder / "removed"),
    }
    in_memory.MESSAGE_BYTES = 4
    return results | {"broadcast": broadcast_from_second(group)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("snapshots")


@pytest.fixture(scope="module")
def three(folder: Path) -> list[dict[str, Any]]:
    return run_distributed(run_on_three_machines, 3, folder, seconds=120)


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    return run_distributed(run_on_two_processes, 2, folder, seconds=120)


@pytest.mark.parametrize("lost", ["", "a"])
def test_newest_snapshot_survives_loss_of_any_machine(folder: Path, three: list[dict[str, Any]], lost: str) -> None:
    for rank, results in enumerate(three):
        called, loaded = results[lost]
        assert called == ([10, 20, 30] if rank == 0 else []), "before_commit runs on the first process"
        assert loaded == (30, 37.0, 30.0, 100.0 * rank + 30)
    files = {path.name for path in folder.glob(f"lost-{lost}/*/step-*/*.safetensors")}
    assert files == {f"{rank}.safetensors" for rank in range(3)}


def test_snapshots_are_lost_with_two_machines(three: list[dict[str, Any]]) -> None:
    assert [results["ab"][1] for results in three] == [None] * 3


def test_one_machine_keeps_its_last_two_snapshots(folder: Path, two: list[dict[str, Any]]) -> None:
    assert [results["one machine"][1] for results in two] == [(30, 37.0, 30.0, 30.0), (30, 37.0, 30.0, 130.0)]
    kept = sorted(path.name for path in (folder / "one-machine" / "a").iterdir())
    assert kept == ["step-00000020", "step-00000030"]


@pytest.mark.parametrize("scenario", ["damaged", "unusable"])
def test_restart_skips_damaged_or_unusable_snapshot(two: list[dict[str, Any]], scenario: str) -> None:
    assert [results[scenario][0] for results in two] == [10, 10]


def test_new_attempt_removes_snapshots_of_later_steps(two: list[dict[str, Any]]) -> None:
    assert [results["again"] for results in two] == [[10, 15]] * 2


def test_failure_is_raised_at_next_snapshot_on_all_processes(two: list[dict[str, Any]]) -> None:
    for results in two:
        message, loaded = results["failed"]
        assert message == "the ledger cannot be written"
        assert loaded[0] == 10, "the last snapshot is kept"


def test_end_of_training_removes_all_snapshots(two: list[dict[str, Any]]) -> None:
    assert [results["removed"] for results in two] == [False, False]


def test_backup_processes_receive_the_shards_they_protect(three: list[dict[str, Any]]) -> None:
    assert [results["ring"] for results in three] == [{rank: shard_of(rank).tolist()} for rank in (2, 0, 1)]


def test_broadcast_sends_bytes_to_all_processes(two: list[dict[str, Any]]) -> None:
    assert [results["broadcast"] for results in two] == [shard_of(1).tolist()] * 2


@pytest.mark.parametrize("data", [torch.empty(0, dtype=torch.uint8), shard_of(1)])
def test_single_process_exchanges_nothing(data: torch.Tensor) -> None:
    assert exchange_copies(data, None, {}, None) == {}
    assert broadcast_bytes(data, len(data), 0, None) is data


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "runs" / "one")
    run.path.mkdir(parents=True)
    return run


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    (tmp_path / "memory").mkdir()
    return tmp_path / "memory"


def test_run_finds_its_private_folder_again(run: Run, memory: Path) -> None:
    folder = open_snapshot_folder(run, memory)
    (folder / "kept").touch()
    assert open_snapshot_folder(run, memory) == folder
    assert (folder / "kept").exists()
    assert folder.stat().st_mode & 0o777 == 0o700


def test_folders_of_deleted_and_finished_runs_are_removed(run: Run, memory: Path) -> None:
    deleted, finished = Run(run.runs / "deleted"), Run(run.runs / "finished")
    for other in (deleted, finished):
        other.path.mkdir()
    folders = [open_snapshot_folder(other, memory) for other in (deleted, finished)]
    assert all(folder.is_dir() for folder in folders), "both may still be training"
    shutil.rmtree(deleted.path)
    finished.output("train").mkdir()
    own = open_snapshot_folder(run, memory)
    assert list(memory.iterdir()) == [own]


def test_machine_without_memory_file_system_is_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train.snapshot=memory: this machine has no .*/none; use snapshot=none"):
        open_snapshot_folder(run, tmp_path / "none")


def test_folder_that_another_user_may_have_made_is_refused(run: Run, memory: Path) -> None:
    folder = open_snapshot_folder(run, memory)
    shutil.rmtree(folder)
    folder.symlink_to(run.path)
    with pytest.raises(ConfigError, match="belongs to another user"):
        open_snapshot_folder(run, memory)


def test_too_little_memory_is_refused_with_both_numbers(memory: Path) -> None:
    check_free_memory(memory, 1)
    free = shutil.disk_usage(memory).free
    with pytest.raises(ConfigError, match=r"train.snapshot=memory needs \d+ MB under .* MB are free; make it larger"):
        check_free_memory(memory, 2 * free + (64 << 20))


def test_memory_storage_adds_files_and_removes_steps(memory: Path) -> None:
    storage = MemoryStorage(memory)
    for step in (10, 20, 30):
        storage.add(step, "manifest.json", memoryview(b"%d" % step))
    storage.add(20, "0.safetensors", memoryview(b"part"))
    assert storage.manifests() == {10: b"10", 20: b"20", 30: b"30"}
    assert bytes(storage.read(20, "0.safetensors").numpy()) == b"part"
    storage.remove_after(20)
    assert storage.steps() == [10, 20]
    storage.remove_before(20)
    assert storage.steps() == [20]


def test_shards_without_a_manifest_are_no_snapshot(memory: Path) -> None:
    MemoryStorage(memory).add(20, "0.safetensors", memoryview(b"part"))
    assert MemoryStorage(memory).manifests() == {}


def test_each_shard_is_backed_up_on_the_next_machine() -> None:
    machines = ["a", "a", "b", "b", "c", "c"]
    assert [BackupPlan(machines, 0).backup_rank(rank) for rank in range(6)] == [2, 3, 4, 5, 0, 1]
    assert BackupPlan(machines, 2).protected_ranks == [0]


def test_smaller_machine_backs_up_several_shards_per_process() -> None:
    machines = ["a", "a", "a", "b"]
    assert [BackupPlan(machines, 0).backup_rank(rank) for rank in range(4)] == [3, 3, 3, 0]
    assert BackupPlan(machines, 3).protected_ranks == [0, 1, 2]
    assert BackupPlan(machines, 0).protected_ranks == [3]
    assert BackupPlan(machines, 1).protected_ranks == []


def test_single_machine_has_no_backup() -> None:
    plan = BackupPlan(["a", "a"], 1)
    assert plan.backup_rank(0) is None
    assert plan.protected_ranks == []


def test_first_process_of_a_machine_is_its_leader() -> None:
    machines = ["a", "b", "a", "b"]
    assert [BackupPlan(machines, rank).is_leader for rank in range(4)] == [True, True, False, False]
    assert BackupPlan(machines, 2).local_ranks == [0, 2]
    assert BackupPlan(machines, 2).leader_ranks == [0, 1]


def manifest(step: int, digest: str = "a", **fields: Any) -> bytes:
    body = {"scaler": {}, "identity": IDENTITY, "world_size": 1, "files": (FileRecord("0.safetensors", 1, digest),)}
    return Manifest(Progress(step), **{**body, **fields}).encode()


def test_candidates_are_sorted_newest_first_without_other_data() -> None:
    other_data = manifest(99, identity={"samples": 38})
    manifests = [{10: manifest(10), 20: manifest(20)}, {20: manifest(20), 30: manifest(30), 99: other_data}]
    assert sorted_candidates(manifests, IDENTITY) == [manifest(30), manifest(20), manifest(10)]


def test_one_step_with_different_shards_gives_two_candidates() -> None:
    assert len(sorted_candidates([{20: manifest(20, "a")}, {20: manifest(20, "b")}], IDENTITY)) == 2


def test_damaged_manifest_is_skipped_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    flipped = manifest(20).replace(b'"step": 20', b'"step": 21')
    assert sorted_candidates([{20: flipped, 10: manifest(10)}], IDENTITY) == [manifest(10)]
    assert "warning: a snapshot is skipped: the digest of its manifest does not match" in capsys.readouterr().err


def test_missing_files_are_sent_by_the_first_machine_that_has_them() -> None:
    names = ["0", "1", "2"]
    assert choose_senders(names, {0: {"0", "1", "2"}, 2: {"0", "1", "2"}}) == {}
    assert choose_senders(names, {0: {"0", "2"}, 2: {"1", "2"}}) == {"0": 0, "1": 2}


def test_snapshot_with_a_file_on_no_machine_is_unusable() -> None:
    assert choose_senders(["0", "1"], {0: {"0"}, 2: {"0"}}) is None
