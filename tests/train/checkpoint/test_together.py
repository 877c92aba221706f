"""Several processes write one checkpoint, and others read it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

from pipeline.contract.errors import ConfigError, PipelineError
from train.chaos_hooks import arm
from train.checkpoint.store import CheckpointStore
from train.process_group import Group, lost_contact
from train.state import Progress, State

from ..conftest import equal
from ..together import together, trained, trainer, weights

FSDP: dict[str, Any] = {"parallel": "fsdp"}
STEP = 10


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two processes, each of which held a half."""
    directory = tmp_path_factory.mktemp("checkpoints")
    together(write, 2, directory)
    return directory


def write(group: Group, directory: Path) -> None:
    made, _ = trained(group, directory, **FSDP, epochs=1)
    whole = {name: tensor.full_tensor() for name, tensor in weights(made).items() if hasattr(tensor, "full_tensor")}
    if group.rank.first:
        torch.save(whole, directory / "whole.pt")


@pytest.mark.parametrize(("size", "words"), [(1, {}), (3, FSDP), (4, FSDP), (2, {}), (3, {"accumulate": 2})])
def test_what_two_wrote_others_read_to_the_same_bits_whatever_they_hold_of_it(
    written: Path, size: int, words: dict[str, Any]
) -> None:
    expected = torch.load(written / "whole.pt")
    assert len(expected) == 8
    for found, count in together(read, size, written, words):
        assert equal(found, expected)
        assert count == STEP


def read(group: Group, directory: Path, words: dict[str, Any]) -> tuple[dict[str, Tensor], int]:
    made = trainer(group, **words)
    saved = CheckpointStore(directory, 99, {}, group).newest()
    assert saved is not None
    made.restore(saved)
    found = {name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for name, tensor in held(made)}
    counts = {int(entry["step"]) for entry in made._optimizer.state.values()}
    return found, counts.pop()


def held(made: Any) -> list[tuple[str, Any]]:
    return [(name, tensor.detach()) for name, tensor in made.strategy.model.named_parameters()]


def test_what_all_hold_is_written_once_by_all_about_as_much(tmp_path: Path) -> None:
    together(save_equal, 2, tmp_path)
    sizes = [path.stat().st_size for path in sorted((tmp_path / "step-00000001").glob("*.safetensors"))]
    assert len(sizes) == 2
    assert sum(sizes) < 4 * 4 * 10_000 + 2_000
    assert max(sizes) < 0.6 * sum(sizes)


def save_equal(group: Group, directory: Path) -> None:
    with CheckpointStore(directory, 9, {}, group) as store:
        store.save(State(Progress(1), {f"weights.{i}": torch.ones(10_000) for i in range(4)}))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_is_full_on_one_machine_is_told_on_all_and_nobody_hangs(tmp_path: Path, rank: int) -> None:
    for said, left in together(save_without_room, 2, tmp_path, rank):
        assert said.startswith(f"disk full on {os.uname().nodename} while writing the checkpoint of step 2; ")
        assert "the last good one is step 1" in said
        assert left == ["step-00000001"]


def save_without_room(group: Group, directory: Path, rank: int) -> tuple[str, list[str]]:
    def no_space(_: int) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = CheckpointStore(directory, 9, {}, group)
    store.save(State(Progress(1), {"weights.it": torch.ones(9)}))
    store.wait()
    if group.rank.rank == rank:
        pytest.MonkeyPatch().setattr(os, "fsync", no_space)
    store.save(State(Progress(2), {"weights.it": torch.ones(9)}))
    try:
        store.wait()
    except PipelineError as error:
        group.gather(None)
        return str(error), sorted(path.name for path in directory.iterdir())
    return "no error", []


def test_a_ledger_that_cannot_be_written_is_told_on_all(tmp_path: Path) -> None:
    assert together(save_with_a_refusal, 2, tmp_path) == ["no room for the ledger"] * 2


def save_with_a_refusal(group: Group, directory: Path) -> str:
    def refuse() -> NoReturn:
        raise ConfigError("no room for the ledger")

    store = CheckpointStore(directory, 9, {}, group)
    store.save(State(Progress(1), {"weights.it": torch.ones(9)}), refuse)
    with pytest.raises(ConfigError) as caught:
        store.wait()
    return str(caught.value)


@pytest.mark.parametrize("place", ["write", "rename", "renamed"])
def test_a_process_that_is_killed_anywhere_in_a_checkpoint_leaves_the_last_whole_one_and_one_for_all(
    tmp_path: Path, place: str
) -> None:
    """Its neighbour is told that it is gone, and the next attempt throws away what was left aside."""
    told = together(save_and_die, 2, tmp_path, place, lost=[0])
    assert told == ["lost contact"]
    for found in together(go_on, 2, tmp_path):
        assert found == (2 if place == "renamed" else 1)
    assert [path.name for path in tmp_path.glob(".step-*")] == []


def save_and_die(group: Group, directory: Path, place: str) -> str:
    def die(reached: str) -> None:
        if reached == place and armed:
            os._exit(9)

    armed: list[int] = []
    if group.rank.first:
        arm(die)
    store = CheckpointStore(directory, 9, {}, group)
    for step in (1, 2):
        if step == 2:
            armed.append(step)
        store.save(State(Progress(step), {"weights.it": torch.full((9,), float(step))}))
        try:
            store.wait()
        except Exception as error:
            return "lost contact" if lost_contact(error) else str(error)
    return "no error"


def go_on(group: Group, directory: Path) -> int:
    store = CheckpointStore(directory, 9, {}, group)
    saved = store.newest()
    assert saved is not None
    assert torch.equal(saved.whole("weights.")["it"], torch.full((9,), float(saved.progress.step)))
    with store:
        store.save(State(Progress(3), {"weights.it": torch.ones(9)}))
    return saved.progress.step


def test_when_one_process_looks_different_all_share_out_anew(tmp_path: Path) -> None:
    together(save_changing, 2, tmp_path)
    store = CheckpointStore(tmp_path, 9, {})
    assert store.load(1).shapes("").keys() == {"weights.it"}
    assert store.load(2).shapes("").keys() == {"weights.it", "own.1.left"}


def save_changing(group: Group, directory: Path) -> None:
    with CheckpointStore(directory, 9, {}, group) as store:
        tensors = {"weights.it": torch.ones(9)}
        store.save(State(Progress(1), tensors))
        own = {"own.1.left": torch.zeros(3)} if group.rank.rank else {}
        store.save(State(Progress(2), {**tensors, **own}))


def test_a_failure_with_a_long_text_is_told_on_all_as_well(tmp_path: Path) -> None:
    for said in together(save_with_a_long_refusal, 2, tmp_path):
        assert said.startswith("no, no, ")
        assert len(said) < 4096


def save_with_a_long_refusal(group: Group, directory: Path) -> str:
    def refuse(*_: object) -> NoReturn:
        raise ConfigError("no, " * 5000)

    store = CheckpointStore(directory, 9, {}, group)
    store.save(State(Progress(1), {"weights.it": torch.ones(9)}))
    store.wait()
    if group.rank.rank == 1:
        pytest.MonkeyPatch().setattr(store._place, "write", refuse)
    store.save(State(Progress(2), {"weights.it": torch.ones(9)}))
    with pytest.raises(ConfigError) as caught:
        store.wait()
    return str(caught.value)
