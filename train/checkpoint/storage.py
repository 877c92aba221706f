"""Storage of checkpoints: a folder that all processes share, or an fsspec URL (`train.checkpoints`).

In a folder a checkpoint is written under a temporary name, synced and renamed. Behind a URL nothing can be renamed:
there a checkpoint is complete once its manifest exists, which is written last.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

import torch
from torch import Tensor

from pipeline.system.errors import ConfigError
from pipeline.system.files import sync
from train.chaos_hooks import run_chaos_hook
from train.checkpoint.format import MANIFEST_NAME, FileRecord

Action = Callable[[], None]


class Storage(Protocol):
    """Several processes write the files of a checkpoint; `commit` completes it."""

    _token: str = ""

    def begin(self, token: str) -> None:
        """Prepare for the first `write`; `token` distinguishes this attempt at training from all others."""
        self._token = token

    def write(self, step: int, name: str, data: memoryview) -> FileRecord: ...

    def commit(self, step: int, manifest: bytes, before: Action) -> None:
        """Complete a checkpoint after all files are written; `before` is called when hardly anything else can fail."""

    def discard(self, step: int) -> None:
        """Remove what was written of a checkpoint that will not be complete."""

    def steps(self) -> list[int]:
        """Return the steps of complete checkpoints, in order."""

    def manifest(self, step: int) -> bytes: ...

    def read(self, step: int, name: str) -> Tensor:
        """Return the bytes of a file; a local one is memory-mapped."""

    def read_range(self, step: int, name: str, start: int, count: int) -> bytes: ...

    def blocks(self, step: int, name: str) -> Iterator[memoryview | bytes]:
        """Yield the bytes of a file, without all of them in memory."""

    def remove(self, step: int) -> None:
        """Remove a checkpoint; what cannot be removed is no checkpoint any more."""

    def clean(self) -> None:
        """Remove what killed attempts have left."""


_REMOVED = ".removed"


class LocalStorage(Storage):
    """`step-00000100/{manifest.json, 0.safetensors, …}`; `.step-00000100.TOKEN` until it is complete."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, step: int, name: str, data: memoryview) -> FileRecord:
        folder = self._temporary_folder(step)
        folder.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        with (folder / name).open("wb") as file:
            for half in _halves(file, data):
                digest.update(half)
                file.write(half)
            file.flush()
            os.fsync(file.fileno())
        return FileRecord(name, len(data), digest.hexdigest())

    def commit(self, step: int, manifest: bytes, before: Action) -> None:
        self.write(step, MANIFEST_NAME, memoryview(manifest))
        temporary, target = self._temporary_folder(step), self._step_folder(step)
        sync(temporary)
        before()
        run_chaos_hook("rename")
        damaged = self._path / f".step-{step:08d}.{self._token}.damaged"
        if target.exists():  # a checkpoint that was skipped at the start
            target.rename(damaged)
        temporary.rename(target)
        run_chaos_hook("renamed")
        sync(self._path)
        shutil.rmtree(damaged, ignore_errors=True)

    def discard(self, step: int) -> None:
        shutil.rmtree(self._temporary_folder(step), ignore_errors=True)

    def steps(self) -> list[int]:
        names = os.listdir(self._path) if self._path.exists() else []  # pathlib's glob takes several times as long
        return sorted(int(name[5:]) for name in names if name.startswith("step-"))

    def manifest(self, step: int) -> bytes:
        return (self._step_folder(step) / MANIFEST_NAME).read_bytes()

    def read(self, step: int, name: str) -> Tensor:
        path = self._step_folder(step) / name
        return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)

    def read_range(self, step: int, name: str, start: int, count: int) -> bytes:
        with (self._step_folder(step) / name).open("rb") as file:
            file.seek(start)
            return file.read(count)

    def blocks(self, step: int, name: str) -> Iterator[memoryview | bytes]:
        yield self.read(step, name).numpy().data

    def remove(self, step: int) -> None:
        """Rename the folder first: on NFS, files that another process has open keep it from being removed at once."""
        self._step_folder(step).rename(self._path / f".step-{step:08d}.{secrets.token_hex(4)}{_REMOVED}")
        for path in self._path.glob(f".step-*{_REMOVED}"):  # also those that could not be removed before
            shutil.rmtree(path, ignore_errors=True)

    def clean(self) -> None:
        for path in self._path.glob(".step-*"):
            if not path.name.endswith(f".{self._token}"):
                shutil.rmtree(path, ignore_errors=True)

    def _step_folder(self, step: int) -> Path:
        return self._path / f"step-{step:08d}"

    def _temporary_folder(self, step: int) -> Path:
        return self._path / f".step-{step:08d}.{self._token}"


def _halves(file: BinaryIO, data: memoryview) -> Iterator[memoryview]:
    middle = len(data) // 2
    yield data[:middle]
    file.flush()
    run_chaos_hook("write")
    yield data[middle:]


_BLOCK_BYTES = 64 << 20


class RemoteStorage(Storage):
    """`step-00000100/{manifest.json, TOKEN-0.safetensors, …}`: different attempts write files of different names."""

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # imported only if there is a URL

            self._files, self._path = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"train.checkpoints={url}: {error}; to fix it: use another URL, or a folder") from error

    def write(self, step: int, name: str, data: memoryview) -> FileRecord:
        name, middle = f"{self._token}-{name}", len(data) // 2
        self._files.makedirs(self._step_folder(step), exist_ok=True)
        with self._files.open(f"{self._step_folder(step)}/{name}", "wb") as file:
            file.write(data[:middle])
            run_chaos_hook("write")
            file.write(data[middle:])
        return FileRecord(name, len(data), hashlib.sha256(data).hexdigest())

    def commit(self, step: int, manifest: bytes, before: Action) -> None:
        before()
        run_chaos_hook("rename")
        self._files.pipe_file(f"{self._step_folder(step)}/{MANIFEST_NAME}", manifest)
        run_chaos_hook("renamed")

    def discard(self, step: int) -> None:
        for path in self._list(self._step_folder(step)):
            if path.rpartition("/")[2].startswith(f"{self._token}-"):
                self._files.rm_file(path)

    def steps(self) -> list[int]:
        return sorted(step for step, complete in self._folders().items() if complete)

    def manifest(self, step: int) -> bytes:
        return self._cat(step, MANIFEST_NAME)

    def read(self, step: int, name: str) -> Tensor:
        return torch.frombuffer(bytearray(self._cat(step, name)), dtype=torch.uint8)

    def read_range(self, step: int, name: str, start: int, count: int) -> bytes:
        return self._cat(step, name, start, start + count)

    def blocks(self, step: int, name: str) -> Iterator[memoryview | bytes]:
        size = self._files.size(f"{self._step_folder(step)}/{name}")
        for start in range(0, size, _BLOCK_BYTES):
            yield self.read_range(step, name, start, _BLOCK_BYTES)

    def remove(self, step: int) -> None:
        """Remove the manifest first: from then on the checkpoint is incomplete."""
        self._files.rm_file(f"{self._step_folder(step)}/{MANIFEST_NAME}")
        self._files.rm(self._step_folder(step), recursive=True)

    def clean(self) -> None:
        for step, complete in self._folders().items():
            if not complete:
                self._files.rm(self._step_folder(step), recursive=True)

    def _folders(self) -> dict[int, bool]:
        """Return for each step whether it is complete."""
        names = [path.rstrip("/").rpartition("/")[2] for path in self._list(self._path)]
        steps = [int(name[5:]) for name in names if name.startswith("step-")]
        return {step: self._files.exists(f"{self._step_folder(step)}/{MANIFEST_NAME}") for step in steps}

    def _cat(self, step: int, name: str, start: int | None = None, end: int | None = None) -> bytes:
        raw: bytes = self._files.cat_file(f"{self._step_folder(step)}/{name}", start=start, end=end)
        return raw

    def _list(self, path: str) -> list[str]:
        self._files.invalidate_cache()  # other processes write there, too
        try:
            paths: list[str] = self._files.ls(path, detail=False)
        except FileNotFoundError:
            return []
        return paths

    def _step_folder(self, step: int) -> str:
        return f"{self._path}/step-{step:08d}"


_LOCAL = "file://"


def make_storage(location: str, directory: Path, run: str) -> Storage:
    """Return the storage at `train.checkpoints`, with a folder for each run, or in the run's own `directory`."""
    if not location:
        return LocalStorage(directory / "checkpoints")
    if "://" in location and not location.startswith(_LOCAL):
        return RemoteStorage(f"{location.rstrip('/')}/{run}")
    return LocalStorage(Path(location.removeprefix(_LOCAL)).expanduser() / run)
