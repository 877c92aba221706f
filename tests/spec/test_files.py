from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from typing import NoReturn

import pytest

from pipeline.spec.files import sync_tree, write_atomic, write_json


def no_space(*_: object) -> NoReturn:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_reader_meets_the_old_content_or_the_new_and_nothing_between(tmp_path: Path) -> None:
    path = tmp_path / "file"
    versions = {bytes([i]) * 300_000 for i in range(2)}
    write_atomic(path, min(versions))
    seen: set[bytes] = set()
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.add(path.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(10):
        for version in sorted(versions):
            write_atomic(path, version)
    done.set()
    reader.join()
    assert seen <= versions


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "file"
    write_atomic(path, "old")
    monkeypatch.setattr(os, call, no_space)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_content_is_synced_before_it_takes_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(handle: int) -> None:
        calls.append("fsync")
        fsync(handle)

    def note_replace(source: str, target: Path) -> None:
        calls.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    write_atomic(tmp_path / "file", "x")
    assert calls == ["fsync", "replace", "fsync"]  # the last one is the directory's


def test_an_interrupt_leaves_nothing_beside_the_file_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: int) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(tmp_path / "file", "x")
    assert list(tmp_path.iterdir()) == []


def test_others_may_read_what_was_written(tmp_path: Path) -> None:
    write_atomic(tmp_path / "file", "x")
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644


def test_equal_values_are_equal_bytes_whatever_their_order(tmp_path: Path) -> None:
    write_json(tmp_path / "a", {"x": 1, "y": [1.5, None]})
    write_json(tmp_path / "b", {"y": [1.5, None], "x": 1})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert json.loads((tmp_path / "a").read_text()) == {"x": 1, "y": [1.5, None]}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_json_that_no_other_reader_takes_is_never_written(tmp_path: Path, value: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "file", {"loss": value})
    assert list(tmp_path.iterdir()) == []


def test_syncing_a_tree_reaches_every_file_and_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "deep").write_text("x")
    (tmp_path / "top").write_text("x")
    synced: set[int] = set()
    fsync = os.fsync

    def note(handle: int) -> None:
        synced.add(os.fstat(handle).st_ino)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", note)
    sync_tree(tmp_path)
    assert synced == {path.stat().st_ino for path in (tmp_path, *tmp_path.rglob("*"))}
