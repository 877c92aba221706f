from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from torch import nn

from pipeline.contract.task import load_weights
from pipeline.system.errors import PipelineError, StageError
from pipeline.system.files import (
    digest_bytes,
    digest_file,
    digest_mapping,
    digest_parts,
    digest_tree,
    read_object,
    sync_tree,
    write_atomic,
    write_json,
)
from tests.weights import save_weights


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (bytes(9), "it is empty; to fix it: restore it from a copy"),
        (b"\xff", "not a JSON object"),
        (b"[]", "not a JSON object"),
        (b'{"a": {}}', "it has no b"),
    ],
)
def test_damaged_object_is_named(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "data.json").write_bytes(content)
    with pytest.raises(PipelineError, match=rf"data\.json: damaged: {sentence}"):
        read_object(tmp_path / "data.json", "a", "b")


def test_digest_depends_on_the_boundaries_of_parts() -> None:
    assert digest_parts(["ab", "c"]) != digest_parts(["a", "bc"])
    assert digest_parts(["ab", ""]) != digest_parts(["", "ab"]) != digest_parts(["ab"])


def test_text_and_its_utf8_bytes_have_one_digest() -> None:
    assert digest_parts(["é"]) == digest_parts(["é".encode()])


def test_digest_of_a_mapping_ignores_order_only() -> None:
    assert digest_mapping({"a": "1", "b": "2"}) == digest_mapping({"b": "2", "a": "1"})
    assert digest_mapping({"a": "b"}) != digest_mapping({"b": "a"})
    assert digest_mapping({"a": "1", "b": "2"}) != digest_mapping({"a": "2", "b": "1"})


def test_a_file_larger_than_one_chunk_is_digested_whole(tmp_path: Path) -> None:
    data = bytes(range(256)) * 5000
    path = tmp_path / "big"
    path.write_bytes(data)
    assert digest_file(path) == digest_bytes(data) == hashlib.sha256(data).hexdigest()


def test_a_tree_lists_regular_files_only_by_their_relative_path(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "b").write_text("b")
    (tmp_path / "a").write_text("a")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert digest_tree(tmp_path) == {"a": digest_bytes(b"a"), "inner/b": digest_bytes(b"b")}


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_failed_atomic_write_leaves_only_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: BaseException
) -> None:
    def fail(*_: object) -> NoReturn:
        raise error

    path = tmp_path / "file"
    write_atomic(path, "old")
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(type(error)):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_reader_sees_old_or_new_content_only(tmp_path: Path) -> None:
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


def test_content_is_synced_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_written_files_are_readable_by_all_users(tmp_path: Path) -> None:
    write_atomic(tmp_path / "file", "x")
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644


def test_equal_values_are_equal_bytes_whatever_their_order(tmp_path: Path) -> None:
    write_json(tmp_path / "a", {"x": 1, "y": [1.5, None]})
    write_json(tmp_path / "b", {"y": [1.5, None], "x": 1})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert json.loads((tmp_path / "a").read_text()) == {"x": 1, "y": [1.5, None]}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nonstandard_json_numbers_are_never_written(tmp_path: Path, value: float) -> None:
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


class Tied(nn.Module):
    """Input and output share one matrix, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


def test_weights_come_back_bit_for_bit_in_evaluation_mode(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).train()
    save_weights(model.state_dict(), tmp_path / "w")
    found = load_weights(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), tmp_path / "w")
    assert not found.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor)


def test_tied_weights_are_written_and_stay_tied(tmp_path: Path) -> None:
    model = Tied()
    save_weights(model.state_dict(), tmp_path / "w")
    found = Tied()
    load_weights(found, tmp_path / "w")
    assert found.head.weight is found.embedding.weight
    assert torch.equal(found.head.weight, model.head.weight)


@pytest.mark.parametrize("model", [nn.Linear(3, 5), nn.Linear(4, 4), nn.Linear(3, 4, bias=False), nn.Sequential()])
def test_weights_of_another_model_are_refused(tmp_path: Path, model: nn.Module) -> None:
    save_weights(nn.Linear(3, 4).state_dict(), tmp_path / "w")
    with pytest.raises(StageError, match="does not fit the task's model") as caught:
        load_weights(model, tmp_path / "w")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\x80\x04pickle", None])
def test_missing_or_invalid_weights_are_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "w").write_bytes(content)
    with pytest.raises(StageError, match="does not fit the task's model"):
        load_weights(nn.Linear(3, 4), tmp_path / "w")
