"""The same behaviour of every kind of storage that `train.checkpoints` may name."""

from __future__ import annotations

import secrets
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pipeline.system.errors import ConfigError
from train.checkpoint.storage import LocalStorage, Storage, make_storage
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
    assert torch.equal(saved.tensors("weights.")["it"], torch.full((2, 2), 40.0))


def test_weights_are_read_without_the_rest_of_their_files(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.checkpoint.storage._BLOCK_BYTES", 200)
    save(url, 10)
    kind, ranges = type(make_storage(url, Path("/nowhere"), "run-1")), list[int]()
    read_range = kind.read_range

    def read(storage: Storage, step: int, name: str, start: int, count: int) -> bytes:
        ranges.append(count)
        return read_range(storage, step, name, start, count)

    monkeypatch.setattr(kind, "read_range", read)
    if kind is not LocalStorage:
        monkeypatch.delattr(kind, "read")
    it = store(url).load(10).tensors("weights.")["it"]
    assert torch.equal(it, torch.full((2, 2), 10.0))
    assert max(ranges) <= 200, "also where digests are checked"
    assert ranges[-1] == it.nbytes


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


def mapped_files(folder: Path) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="this system has no /proc/self/maps")
def test_no_file_stays_mapped_after_it_was_loaded(tmp_path: Path) -> None:
    save(str(tmp_path), 10)
    saved = store(str(tmp_path)).newest()
    assert saved is not None
    it = torch.empty(2, 2)
    saved.load({"weights.it": it})
    assert torch.equal(it, torch.full((2, 2), 10.0))
    assert mapped_files(tmp_path) == []


@pytest.fixture
def fuse(tmp_path: Path) -> Iterator[Path]:
    """A mount on which, as on NFS, a removed file that a process has open stays in its folder under another name."""
    if not (shutil.which("bindfs") and Path("/dev/fuse").exists()):
        pytest.skip("needs bindfs and /dev/fuse")
    original, mounted = tmp_path / "original", tmp_path / "mounted"
    original.mkdir()
    mounted.mkdir()
    attempt = subprocess.run(["bindfs", str(original), str(mounted)], capture_output=True, text=True)
    if attempt.returncode:
        pytest.skip(f"bindfs cannot mount: {attempt.stderr.strip()}")
    yield mounted
    subprocess.run(["fusermount", "-u", "-z", str(mounted)], check=True)


def test_a_checkpoint_that_another_process_reads_is_removed_later(fuse: Path) -> None:
    save(str(fuse), 10)
    name = next(path.name for path in (fuse / "run-1" / "step-00000010").iterdir() if path.suffix == ".safetensors")
    with (fuse / "run-1" / "step-00000010" / name).open("rb"):
        for step in (20, 30):
            save(str(fuse), step)
        assert store(str(fuse)).steps() == [20, 30]
        assert list((fuse / "run-1").glob(".step-*"))  # what NFS keeps for the reader
    save(str(fuse), 40)
    assert sorted(path.name for path in (fuse / "run-1").iterdir()) == ["step-00000030", "step-00000040"]


def test_training_goes_on_if_old_checkpoints_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_storage: LocalStorage, _step: int) -> None:
        raise OSError(39, "Directory not empty")

    monkeypatch.setattr(LocalStorage, "remove", refuse)
    with store(str(tmp_path), keep=1) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(state(step, fill=step))
    assert store(str(tmp_path)).steps() == [10, 20, 30]
    assert capsys.readouterr().err == ("warning: old checkpoints cannot be removed: [Errno 39] Directory not empty\n")
