"""Checkpoints behind an fsspec URL, where nothing is renamed: the manifest, written last, makes them count."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from pipeline.spec.errors import ConfigError
from train.checkpoint.manifest import NAME, Written
from train.checkpoint.place import Deed
from train.peril import reached


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
