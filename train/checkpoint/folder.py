"""Checkpoints in a folder that all processes see: written aside, synced, renamed."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from pipeline.spec.files import sync_directory
from train.checkpoint.manifest import NAME, Written
from train.checkpoint.place import Deed
from train.peril import reached


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
