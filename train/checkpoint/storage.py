"""Where checkpoints are kept.

Checkpoints in a folder that all processes see: written aside, synced, renamed.

Checkpoints behind an fsspec URL, where nothing is renamed: the manifest, written last, makes them count.

Where a run's checkpoints are, by `train.checkpoints`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

import torch
from torch import Tensor

from pipeline.contract.errors import ConfigError
from pipeline.contract.files import sync_directory
from train.chaos_hooks import reached
from train.checkpoint.format import NAME, Written

Deed = Callable[[], None]


class Place(Protocol):
    """Files of a checkpoint come one by one, from several processes; `commit` makes them one that counts."""

    def begin(self, token: str) -> None:
        """Once before the first `write`: `token` tells this attempt at training from every other."""

    def write(self, step: int, name: str, data: memoryview) -> Written: ...

    def commit(self, step: int, manifest: bytes, before: Deed) -> None:
        """By the first process, when all have written; `before` is done when nothing but this can fail any more."""

    def discard(self, step: int) -> None:
        """What was written of a checkpoint that will not be complete."""

    def steps(self) -> list[int]:
        """Of checkpoints that were committed, in order."""

    def manifest(self, step: int) -> bytes: ...

    def read(self, step: int, name: str) -> Tensor:
        """A file, as bytes; of a local one what is looked at is read."""

    def head(self, step: int, name: str, start: int, count: int) -> bytes: ...

    def remove(self, step: int) -> None: ...

    def clean(self) -> None:
        """Throw away what attempts that were killed have left."""


class Folder:
    """`step-00000100/{manifest.json, 0.safetensors, …}`; `.step-00000100.TOKEN` until it is complete."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._token = ""

    def begin(self, token: str) -> None:
        self._token = token

    def write(self, step: int, name: str, data: memoryview) -> Written:
        aside = self._aside(step)
        aside.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        with (aside / name).open("wb") as file:
            for piece in _halves(file, data):
                digest.update(piece)
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        return Written(name, len(data), digest.hexdigest())

    def commit(self, step: int, manifest: bytes, before: Deed) -> None:
        self.write(step, NAME, memoryview(manifest))
        aside, target = self._aside(step), self._of(step)
        sync_directory(aside)
        before()
        reached("rename")
        passed_over = self._path / f".step-{step:08d}.{self._token}.damaged"
        if target.exists():
            target.rename(passed_over)
        aside.rename(target)
        reached("renamed")
        sync_directory(self._path)
        shutil.rmtree(passed_over, ignore_errors=True)

    def discard(self, step: int) -> None:
        shutil.rmtree(self._aside(step), ignore_errors=True)

    def steps(self) -> list[int]:
        names = os.listdir(self._path) if self._path.exists() else []  # pathlib's glob takes several times as long
        return sorted(int(name[5:]) for name in names if name.startswith("step-"))

    def manifest(self, step: int) -> bytes:
        return (self._of(step) / NAME).read_bytes()

    def read(self, step: int, name: str) -> Tensor:
        path = self._of(step) / name
        return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)

    def head(self, step: int, name: str, start: int, count: int) -> bytes:
        with (self._of(step) / name).open("rb") as file:
            file.seek(start)
            return file.read(count)

    def remove(self, step: int) -> None:
        shutil.rmtree(self._of(step))

    def clean(self) -> None:
        for path in self._path.glob(".step-*"):
            if not path.name.endswith(f".{self._token}"):
                shutil.rmtree(path, ignore_errors=True)

    def _of(self, step: int) -> Path:
        return self._path / f"step-{step:08d}"

    def _aside(self, step: int) -> Path:
        return self._path / f".step-{step:08d}.{self._token}"


def _halves(file: BinaryIO, data: memoryview) -> Iterator[memoryview]:
    middle = len(data) // 2
    yield data[:middle]
    file.flush()
    reached("write")
    yield data[middle:]


class Bucket:
    """`step-00000100/{manifest.json, TOKEN-0.safetensors, …}`: no two attempts write files of the same name."""

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # at first use: few give a URL

            self._files, self._path = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"train.checkpoints={url}: {error}; or name a folder") from error
        self._token = ""

    def begin(self, token: str) -> None:
        self._token = token

    def write(self, step: int, name: str, data: memoryview) -> Written:
        name, middle = f"{self._token}-{name}", len(data) // 2
        self._files.makedirs(self._of(step), exist_ok=True)
        with self._files.open(f"{self._of(step)}/{name}", "wb") as file:
            file.write(data[:middle])
            reached("write")
            file.write(data[middle:])
        return Written(name, len(data), hashlib.sha256(data).hexdigest())

    def commit(self, step: int, manifest: bytes, before: Deed) -> None:
        before()
        reached("rename")
        self._files.pipe_file(f"{self._of(step)}/{NAME}", manifest)
        reached("renamed")

    def discard(self, step: int) -> None:
        for path in self._listed(self._of(step)):
            if path.rpartition("/")[2].startswith(f"{self._token}-"):
                self._files.rm_file(path)

    def steps(self) -> list[int]:
        return sorted(step for step, whole in self._folders().items() if whole)

    def manifest(self, step: int) -> bytes:
        raw: bytes = self._files.cat_file(f"{self._of(step)}/{NAME}")
        return raw

    def read(self, step: int, name: str) -> Tensor:
        return torch.frombuffer(bytearray(self._files.cat_file(f"{self._of(step)}/{name}")), dtype=torch.uint8)

    def head(self, step: int, name: str, start: int, count: int) -> bytes:
        raw: bytes = self._files.cat_file(f"{self._of(step)}/{name}", start=start, end=start + count)
        return raw

    def remove(self, step: int) -> None:
        """The manifest first: from there on it is none."""
        self._files.rm_file(f"{self._of(step)}/{NAME}")
        self._files.rm(self._of(step), recursive=True)

    def clean(self) -> None:
        for step, whole in self._folders().items():
            if not whole:
                self._files.rm(self._of(step), recursive=True)

    def _folders(self) -> dict[int, bool]:
        """Step → whether a manifest says that it is complete."""
        names = [path.rstrip("/").rpartition("/")[2] for path in self._listed(self._path)]
        steps = [int(name[5:]) for name in names if name.startswith("step-")]
        return {step: self._files.exists(f"{self._of(step)}/{NAME}") for step in steps}

    def _listed(self, path: str) -> list[str]:
        self._files.invalidate_cache()  # other processes write there too
        try:
            found: list[str] = self._files.ls(path, detail=False)
        except FileNotFoundError:
            return []
        return found

    def _of(self, step: int) -> str:
        return f"{self._path}/step-{step:08d}"


_LOCAL = "file://"  # a folder as any other: it is synced and renamed


def place_of(word: str, directory: Path, run: str) -> Place:
    """In the run's own `directory`, or elsewhere, where each run has a folder of its own."""
    if not word:
        return Folder(directory / "checkpoints")
    if "://" in word and not word.startswith(_LOCAL):
        return Bucket(f"{word.rstrip('/')}/{run}")
    return Folder(Path(word.removeprefix(_LOCAL)).expanduser() / run)
