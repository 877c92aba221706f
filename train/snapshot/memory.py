"""A machine's memory file system: a folder there for each run, which outlives every process of it."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from pipeline.spec.digest import digest_bytes
from pipeline.spec.errors import ConfigError
from pipeline.spec.run import Run
from train.checkpoint.folder import Folder
from train.checkpoint.manifest import NAME

MEMORY = Path("/dev/shm")  # noqa: S108
_RUN = "run.txt"  # whose folder it is


def open_memory(run: Run, memory: Path = MEMORY) -> Path:
    """This run's folder; those of runs that are over, or gone, are removed."""
    if not memory.is_dir():
        raise ConfigError(f"train.snapshot=memory: this machine has no {memory}; use snapshot=none")
    _forget_others(memory)
    folder = memory / f"{_prefix()}{digest_bytes(str(run.path).encode())[:12]}"
    folder.mkdir(mode=0o700, exist_ok=True)
    held = folder.lstat()
    if held.st_uid != os.getuid() or not stat.S_ISDIR(held.st_mode):
        raise ConfigError(f"{folder} belongs to somebody else; remove it, or use train.snapshot=none")
    (folder / _RUN).write_text(str(run.path))
    return folder


def check_room(folder: Path, needed_bytes: int) -> None:
    """What is there already is replaced, the newest apart; so it counts as free."""
    there = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    free = shutil.disk_usage(folder).free + there
    if free < needed_bytes:
        raise ConfigError(
            f"train.snapshot=memory needs {_mb(needed_bytes)} MB under {folder.parent} of {os.uname().nodename}, "
            f"{_mb(free)} MB are free; make it larger (in a container: a volume of medium Memory), or use snapshot=none"
        )


class Shelf(Folder):
    """Snapshots as checkpoints are kept; a part that another machine has is put into its place."""

    def fill(self, step: int, name: str, data: memoryview) -> None:
        place = self._of(step)
        place.mkdir(parents=True, exist_ok=True)
        aside = place / f".{name}"
        aside.write_bytes(data)
        aside.replace(place / name)

    def manifests(self) -> dict[int, bytes]:
        return {step: self.manifest(step) for step in self.steps() if (self._of(step) / NAME).is_file()}

    def forget_before(self, step: int) -> None:
        for found in self.steps():
            if found < step:
                self.remove(found)

    def forget_after(self, step: int) -> None:
        for found in self.steps():
            if found > step:
                self.remove(found)


def _forget_others(memory: Path) -> None:
    for folder in memory.glob(f"{_prefix()}*"):
        told = folder / _RUN
        if told.is_file() and _is_over(Run(Path(told.read_text()))):
            shutil.rmtree(folder, ignore_errors=True)


def _is_over(run: Run) -> bool:
    return not run.path.is_dir() or run.output("train").is_dir()


def _prefix() -> str:
    return f"pipe-{os.getuid()}-"


def _mb(count: int) -> int:
    return -(-count // 2**20)
