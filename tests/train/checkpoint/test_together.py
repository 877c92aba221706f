"""Checkpoints of several processes. The processes are started once and run all scenarios, each in its own folder."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

from pipeline.system.errors import ConfigError, PipelineError
from pipeline.system.processes import Rank
from train.chaos_hooks import install_chaos_hook
from train.checkpoint.storage import make_storage
from train.checkpoint.store import CheckpointStore
from train.process_group import ProcessGroup, is_lost_contact
from train.state import Progress, State

from ..conftest import equal
from ..distributed import run_distributed, trained, trainer, weights

FSDP: dict[str, Any] = {"strategy": "fsdp"}
STEP = 10


def make_store(group: ProcessGroup, directory: Path) -> CheckpointStore:
    return CheckpointStore(directory, 9, {}, group)


def state(step: int, **tensors: Tensor) -> State:
    return State(Progress(step), {"weights.it": torch.full((9,), float(step)), **tensors})


def failure_of(store: CheckpointStore) -> str:
    with pytest.raises(PipelineError) as caught:
        store.wait()
    return str(caught.value)


def train_sharded(group: ProcessGroup, directory: Path) -> None:
    """Train with FSDP, and save the final weights whole, too."""
    result, _ = trained(group, directory, **FSDP, epochs=1)
    whole = {name: tensor.full_tensor() for name, tensor in weights(result).items() if hasattr(tensor, "full_tensor")}
    if group.rank.first:
        torch.save(whole, directory / "whole.pt")
    group.gather(None)


def load(group: ProcessGroup, directory: Path, settings: dict[str, Any]) -> tuple[dict[str, Tensor], int]:
    """Return the weights that a trainer with these settings restores, and the optimizer's step count."""
    fresh = trainer(group, **settings)
    saved = CheckpointStore(directory, 99, {}, group).newest()
    assert saved is not None
    fresh.restore(saved)
    named = [(name, tensor.detach()) for name, tensor in fresh.strategy.model.named_parameters()]
    loaded = {name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for name, tensor in named}
    counts = {int(entry["step"]) for entry in fresh._optimizer.state.values()}
    return loaded, counts.pop()


def save_replicated(group: ProcessGroup, directory: Path) -> None:
    with make_store(group, directory) as store:
        store.save(State(Progress(1), {f"weights.{i}": torch.ones(10_000) for i in range(4)}))


def save_to_full_disk(group: ProcessGroup, directory: Path, full_rank: int) -> tuple[str, list[str]]:
    def no_space(_: int) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = make_store(group, directory)
    store.save(state(1))
    store.wait()
    with pytest.MonkeyPatch.context() as patch:
        if group.rank.rank == full_rank:
            patch.setattr(os, "fsync", no_space)
        store.save(state(2))
        error = failure_of(store)
    group.gather(None)
    return error, sorted(path.name for path in directory.iterdir())


def fail_before_commit(group: ProcessGroup, directory: Path) -> str:
    def fail() -> NoReturn:
        raise ConfigError("no room for the ledger")

    store = make_store(group, directory)
    store.save(state(1), fail)
    return failure_of(store)


def fail_with_a_long_message(group: ProcessGroup, directory: Path) -> str:
    def fail(*_: object) -> NoReturn:
        raise ConfigError("no, " * 5000)

    store = make_store(group, directory)
    store.save(state(1))
    store.wait()
    with pytest.MonkeyPatch.context() as patch:
        if group.rank.rank == 1:
            patch.setattr(store._storage, "write", fail)
        store.save(state(2))
        return failure_of(store)


def change_state_of_one_process(group: ProcessGroup, directory: Path) -> None:
    with make_store(group, directory) as store:
        store.save(state(1))
        store.save(state(2, **({"own.1.left": torch.zeros(3)} if group.rank.rank else {})))


def save_behind_url(group: ProcessGroup, directory: Path) -> None:
    storage = make_storage(f"local://{directory}", Path("/nowhere"), "run-1")
    with CheckpointStore(storage, 2, {}, group) as store:
        store.save(State(Progress(5), {"weights.a": torch.full((3,), 2.0), "weights.b": torch.full((3,), 3.0)}))


def load_behind_url(group: ProcessGroup, directory: Path) -> float:
    saved = CheckpointStore(make_storage(f"local://{directory}", Path("/nowhere"), "run-1"), 2, {}, group).newest()
    assert saved is not None
    return float(sum(tensor[0] for tensor in saved.tensors("weights.").values()))


def run_two_processes(group: ProcessGroup, folder: Path) -> dict[str, Any]:
    train_sharded(group, folder / "sharded")
    save_replicated(group, folder / "replicated")
    save_behind_url(group, folder / "url")
    change_state_of_one_process(group, folder / "changed")
    return {
        "loaded": load(group, folder / "sharded", {}),
        "full disk 0": save_to_full_disk(group, folder / "full-0", 0),
        "full disk 1": save_to_full_disk(group, folder / "full-1", 1),
        "failed before commit": fail_before_commit(group, folder / "ledger"),
        "long message": fail_with_a_long_message(group, folder / "long"),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    (folder / "sharded").mkdir()
    return run_distributed(run_two_processes, 2, folder, seconds=120)


def load_in_three(group: ProcessGroup, folder: Path) -> tuple[list[tuple[dict[str, Tensor], int]], float]:
    loaded = [load(group, folder / "sharded", settings) for settings in (FSDP, {"accumulate": 2})]
    return loaded, load_behind_url(group, folder / "url")


@pytest.mark.usefixtures("two")
def test_one_and_three_processes_load_what_two_wrote(folder: Path) -> None:
    """Whatever strategy they use: FSDP shards differently, DDP needs all weights."""
    expected = torch.load(folder / "sharded" / "whole.pt")
    assert len(expected) == 8
    in_three = run_distributed(load_in_three, 3, folder)
    single = load(ProcessGroup(Rank(), torch.device("cpu")), folder / "sharded", {})
    for weights_loaded, count in [single, *(result for loaded, _ in in_three for result in loaded)]:
        assert equal(weights_loaded, expected)
        assert count == STEP
    assert [total for _, total in in_three] == [5.0] * 3, "behind a URL"


def test_two_ddp_processes_load_what_two_fsdp_processes_wrote(folder: Path, two: list[dict[str, Any]]) -> None:
    for results in two:
        loaded, count = results["loaded"]
        assert equal(loaded, torch.load(folder / "sharded" / "whole.pt"))
        assert count == STEP


@pytest.mark.usefixtures("two")
def test_replicated_tensors_are_written_once_and_divided(folder: Path) -> None:
    files = sorted((folder / "replicated" / "step-00000001").glob("*.safetensors"))
    sizes = [path.stat().st_size for path in files]
    assert len(sizes) == 2
    assert sum(sizes) < 4 * 4 * 10_000 + 2_000
    assert max(sizes) < 0.6 * sum(sizes)


@pytest.mark.parametrize("full_rank", [0, 1])
def test_full_disk_of_one_machine_is_reported_on_all(two: list[dict[str, Any]], full_rank: int) -> None:
    for results in two:
        error, files = results[f"full disk {full_rank}"]
        assert error.startswith(f"disk full on {os.uname().nodename} while writing the checkpoint of step 2; ")
        assert "the last good one is step 1" in error
        assert files == ["step-00000001"]


def test_failure_before_commit_is_raised_on_all(two: list[dict[str, Any]]) -> None:
    assert [results["failed before commit"] for results in two] == ["no room for the ledger"] * 2


def test_long_failure_is_shortened_and_raised_on_all(two: list[dict[str, Any]]) -> None:
    for results in two:
        assert results["long message"].startswith("no, no, ")
        assert len(results["long message"]) < 4096


@pytest.mark.usefixtures("two")
def test_state_that_appears_in_one_process_is_saved(folder: Path) -> None:
    store = CheckpointStore(folder / "changed", 9, {})
    assert store.load(1).shapes("").keys() == {"weights.it"}
    assert store.load(2).shapes("").keys() == {"weights.it", "own.1.left"}


def test_killed_process_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    """Wherever it is killed in a checkpoint; the next attempt continues and removes what was left."""
    places = ("write", "rename", "renamed")
    for place in places:
        assert run_distributed(save_and_die, 2, tmp_path / place, place, lost=[0]) == ["lost contact"]
    for steps in run_distributed(continue_after_kill, 2, tmp_path, places):
        assert steps == [1, 1, 2], "after the rename the new checkpoint is complete"
    assert list(tmp_path.glob("*/.step-*")) == []


def save_and_die(group: ProcessGroup, directory: Path, place: str) -> str:
    def die(hook: str) -> None:
        if hook == place and armed:
            os._exit(9)

    armed: list[int] = []
    if group.rank.first:
        install_chaos_hook(die)
    store = make_store(group, directory)
    for step in (1, 2):
        if step == 2:
            armed.append(step)
        store.save(state(step))
        try:
            store.wait()
        except Exception as error:
            return "lost contact" if is_lost_contact(error) else str(error)
    return "no error"


def continue_after_kill(group: ProcessGroup, folder: Path, places: tuple[str, ...]) -> list[int]:
    steps = []
    for place in places:
        store = make_store(group, folder / place)
        saved = store.newest()
        assert saved is not None
        assert torch.equal(saved.tensors("weights.")["it"], torch.full((9,), float(saved.progress.step)))
        with store:
            store.save(state(3))
        steps.append(saved.progress.step)
    return steps
