from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path
from typing import Any, ClassVar

import fsspec  # type: ignore[import-untyped]
import pytest
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]

from pipeline.contract.registry import FolderStore, ObjectStore, RegistryStore, open_store
from pipeline.system.errors import ConfigError, ResourceError


class Lax(MemoryFileSystem):  # type: ignore[misc]
    """Ignores the condition of a write, as some S3-compatible stores do."""

    protocol = ("s3", "lax")

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **words: Any) -> None:
        super().pipe_file(path, value)


class Plain(MemoryFileSystem):  # type: ignore[misc]
    """Checks first and writes afterwards, so that another writer can write in between."""

    protocol = "plain"


class Http(MemoryFileSystem):  # type: ignore[misc]
    """Raises the HTTP error of the store instead of FileExistsError."""

    protocol = ("gs", "http-like")
    code = 412

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **words: Any) -> None:
        try:
            super().pipe_file(path, value, mode=mode)
        except FileExistsError:
            error = RuntimeError("conditionNotMet")
            error.code = self.code  # type: ignore[attr-defined]
            raise error from None


class Remembering(MemoryFileSystem):  # type: ignore[misc]
    """Caches listings, as libraries of object stores do."""

    protocol = ("gs", "remembering")
    listed: ClassVar[dict[str, list[str]]] = {}

    def ls(self, path: str, detail: bool = True, **words: Any) -> Any:
        found = super().ls(path, detail=False)
        self.listed[path] = found
        return found

    def cat(self, path: Any, **words: Any) -> Any:
        for one in path:
            if one not in self.listed.get(one.rpartition("/")[0], [one]):
                raise FileNotFoundError(one)
        return super().cat(path, **words)

    def invalidate_cache(self, path: str | None = None) -> None:
        self.listed.clear()


for _kind, _name in ((Remembering, "remembering"), (Lax, "lax"), (Plain, "plain"), (Http, "http-like")):
    fsspec.register_implementation(_name, _kind, clobber=True)


def at(kind: str) -> str:
    return f"{kind}://{secrets.token_hex(4)}"


@pytest.fixture(params=["folder", "no links", "memory", "http-like"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RegistryStore:
    if request.param == "no links":

        def refuse(*_: Any) -> None:
            raise OSError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "link", refuse)
    return (
        FolderStore(tmp_path / "store") if request.param in ("folder", "no links") else ObjectStore(at(request.param))
    )


def test_existing_object_is_never_replaced(store: RegistryStore) -> None:
    assert store.names() == []
    assert store.create("one", b"first")
    assert not store.create("one", b"second")
    assert store.read(["one"]) == [b"first"]
    assert "one" in store.names()
    assert store.create("one", b"first") is isinstance(store, ObjectStore), "a repeated request succeeds"


def test_uploaded_file_is_downloaded_unchanged(store: RegistryStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    assert not store.has("deep/er/file")
    store.upload(tmp_path / "file", "deep/er/file")
    assert store.has("deep/er/file")
    store.download("deep/er/file", tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == b"content"


@pytest.mark.parametrize("kind", ["lax", "plain"])
def test_store_without_exclusive_writes_is_refused(kind: str) -> None:
    store = ObjectStore(at(kind))
    with pytest.raises(ConfigError, match=r"concurrent writers could overwrite each other.*use a folder"):
        store.create("one", b"x")
    assert store.names() in ([], ["exclusive"])


def test_objects_of_other_processes_are_seen_despite_cached_listings() -> None:
    url = at("remembering")
    store = ObjectStore(url)
    store.create("one", b"x")
    store.names()
    MemoryFileSystem().pipe_file(f"{store._path}/two", b"theirs")
    assert not store.create("two", b"mine")
    assert store.read(["two"]) == [b"theirs"]


def test_server_error_is_not_taken_for_an_existing_object() -> None:
    store = ObjectStore(at("http-like"))
    store.create("one", b"x")
    Http.code = 503
    try:
        with pytest.raises(ResourceError, match=r"cannot write the registry http-like://.*conditionNotMet"):
            store.create("one", b"y")
    finally:
        Http.code = 412


def test_unresponsive_store_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no credentials")

    store = ObjectStore(at("memory"))
    for method in ("ls", "cat", "exists", "put_file", "get_file"):
        monkeypatch.setattr(MemoryFileSystem, method, fail)
    for ask in (
        store.names,
        lambda: store.read(["one"]),
        lambda: store.has("one"),
        lambda: store.upload(tmp_path, "one"),
        lambda: store.download("one", tmp_path),
    ):
        with pytest.raises(ResourceError, match=r"the registry memory://.* cannot be reached: RuntimeError: no cred"):
            ask()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match=r"cannot write the registry .*file/deeper: not a directory"):
        FolderStore(tmp_path / "file" / "deeper").create("one", b"x")


@pytest.mark.parametrize(
    ("word", "where"),
    [("", "project/runs/registry"), ("names", "project/names"), ("../team", "team"), ("local:///all", "/all")],
)
def test_relative_registry_folder_is_resolved_from_the_project(tmp_path: Path, word: str, where: str) -> None:
    assert Path(open_store(word, tmp_path / "project" / "runs").where) == tmp_path / where


def test_unreadable_registry_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "registry").write_text("a file")
    with pytest.raises(ResourceError, match=r"cannot read .*registry of the registry: not a directory"):
        FolderStore(tmp_path / "registry").names()
    (tmp_path / "000001.json").mkdir()
    with pytest.raises(ResourceError, match=r"cannot read .*000001.json of the registry: is a directory"):
        FolderStore(tmp_path).read(["000001.json"])
