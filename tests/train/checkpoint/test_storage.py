"""The same promises for every place that `train.checkpoints` may name."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest
import torch

from pipeline.contract.errors import ConfigError
from train.checkpoint.storage import Folder, place_of
from train.checkpoint.store import CheckpointStore
from train.process_group import Group
from train.state import Progress, State

from ..together import together
from .conftest import IDENTITY, state


@pytest.fixture(params=["folder", "file://", "memory://", "local://"])
def word(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return {
        "folder": str(tmp_path),
        "file://": f"file://{tmp_path}",
        "memory://": f"memory://{secrets.token_hex(4)}",
        "local://": f"local://{tmp_path}",
    }[str(request.param)]


def store(word: str, keep: int = 2) -> CheckpointStore:
    return CheckpointStore(place_of(word, Path("/nowhere"), "run-1"), keep, IDENTITY)


def save(word: str, step: int, best: int = 0) -> None:
    with store(word) as opened:
        opened.save(state(step, best, fill=step))


def test_what_was_saved_is_found_and_the_newest_few_and_the_best_are_kept(word: str) -> None:
    assert store(word).newest() is None
    for step in (10, 20, 30, 40):
        save(word, step, best=10)
    assert store(word).steps() == [10, 30, 40]
    found = store(word).newest()
    assert found is not None
    assert torch.equal(found.whole("weights.")["it"], torch.full((2, 2), 40.0))


def test_one_without_a_manifest_is_none_and_is_thrown_away_by_the_next_attempt(word: str) -> None:
    place = place_of(word, Path("/nowhere"), "run-1")
    place.begin("0a0b0c0d")
    place.write(10, "0.safetensors", memoryview(b"half of it"))
    assert store(word).steps() == []
    assert store(word).newest() is None
    save(word, 10)
    assert store(word).steps() == [10]


def test_a_failure_before_it_counts_leaves_the_one_before(word: str) -> None:
    def refuse() -> None:
        raise ConfigError("no room for the ledger")

    save(word, 10)
    opened = store(word)
    opened.save(state(20), refuse)
    with pytest.raises(ConfigError, match="no room"):
        opened.wait()
    assert store(word).steps() == [10]


def test_one_of_the_same_step_takes_the_place_of_a_damaged_one(word: str) -> None:
    save(word, 10)
    save(word, 10)
    found = store(word).newest()
    assert found is not None
    assert found.progress.step == 10


def test_each_run_has_a_folder_of_its_own_and_without_a_word_they_stand_in_the_run(tmp_path: Path) -> None:
    assert isinstance(place_of("", tmp_path, "run-1"), Folder)
    save(str(tmp_path / "kept"), 10)
    assert (tmp_path / "kept" / "run-1" / "step-00000010" / "manifest.json").exists()


def test_a_url_that_nothing_can_open_is_refused_with_its_word() -> None:
    with pytest.raises(ConfigError, match=r"train.checkpoints=nonsense://x/run-1: .*; or name a folder"):
        place_of("nonsense://x", Path("/nowhere"), "run-1")


def test_several_processes_write_behind_a_url(tmp_path: Path) -> None:
    word = f"local://{tmp_path}"
    together(save_together, 2, word)
    assert together(read_together, 3, word) == [5.0] * 3


def save_together(group: Group, word: str) -> None:
    with CheckpointStore(place_of(word, Path("/nowhere"), "run-1"), 2, IDENTITY, group) as opened:
        opened.save(State(Progress(5), {"weights.a": torch.full((3,), 2.0), "weights.b": torch.full((3,), 3.0)}))


def read_together(group: Group, word: str) -> float:
    found = CheckpointStore(place_of(word, Path("/nowhere"), "run-1"), 2, IDENTITY, group).newest()
    assert found is not None
    return float(sum(tensor[0] for tensor in found.whole("weights.").values()))
