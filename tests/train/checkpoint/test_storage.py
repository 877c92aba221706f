"""The same promises for every kind of storage that `train.checkpoints` may name."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest
import torch

from pipeline.contract.errors import ConfigError
from train.checkpoint.storage import LocalStorage, make_storage
from train.checkpoint.store import CheckpointStore

from .conftest import IDENTITY, state


@pytest.fixture(params=["folder", "file://", "memory://", "local://"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return {
        "folder": str(tmp_path),
        "file://": f"file://{tmp_path}",
        "memory://": f"memory://{secrets.token_hex(4)}",
        "local://": f"local://{tmp_path}",
    }[str(request.param)]


def store(url: str, keep: int = 2) -> CheckpointStore:
    return CheckpointStore(make_storage(url, Path("/nowhere"), "run-1"), keep, IDENTITY)


def save(url: str, step: int, best: int = 0) -> None:
    with store(url) as checkpoints:
        checkpoints.save(state(step, best, fill=step))


def test_newest_checkpoints_and_the_best_are_kept(url: str) -> None:
    assert store(url).newest() is None
    for step in (10, 20, 30, 40):
        save(url, step, best=10)
    assert store(url).steps() == [10, 30, 40]
    saved = store(url).newest()
    assert saved is not None
    assert torch.equal(saved.read_all("weights.")["it"], torch.full((2, 2), 40.0))


def test_checkpoint_without_manifest_is_ignored_and_removed(url: str) -> None:
    storage = make_storage(url, Path("/nowhere"), "run-1")
    storage.begin("0a0b0c0d")
    storage.write(10, "0.safetensors", memoryview(b"half of it"))
    assert store(url).steps() == []
    assert store(url).newest() is None
    save(url, 10)
    assert store(url).steps() == [10]


def test_failure_before_commit_keeps_the_last_checkpoint(url: str) -> None:
    def fail() -> None:
        raise ConfigError("no room for the ledger")

    save(url, 10)
    checkpoints = store(url)
    checkpoints.save(state(20), fail)
    with pytest.raises(ConfigError, match="no room"):
        checkpoints.wait()
    assert store(url).steps() == [10]


def test_checkpoint_replaces_one_of_the_same_step(url: str) -> None:
    save(url, 10)
    save(url, 10)
    saved = store(url).newest()
    assert saved is not None
    assert saved.progress.step == 10


def test_each_run_has_its_own_folder(tmp_path: Path) -> None:
    assert isinstance(make_storage("", tmp_path, "run-1"), LocalStorage)
    save(str(tmp_path / "kept"), 10)
    assert (tmp_path / "kept" / "run-1" / "step-00000010" / "manifest.json").exists()


def test_url_of_unknown_scheme_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"train.checkpoints=nonsense://x/run-1: .*; to fix it: use another URL, or a folder"
    ):
        make_storage("nonsense://x", Path("/nowhere"), "run-1")
