"""Files that model, data and codec share, as a tokenizer: made once in prepare, named in data.json, checked by all."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.spec.digest import digest_tree
from pipeline.spec.errors import DataError
from pipeline.spec.run import Run
from pipeline.spec.task import HasFiles, Task, load_task

FOLDER = "files"  # of the prepare step's output
KEY = "files"  # in data.json, whose own digest is part of every later step's key and of the bundle's lineage


def make_companions(task: Task, folder: Path) -> None:
    """In prepare: what the task makes joins what lies there already, and the task goes on with it."""
    if isinstance(task, HasFiles):
        folder.mkdir(parents=True, exist_ok=True)
        task.make_files(folder)
        _check_plain(folder)
        task.use_files(folder)


def companions_in(folder: Path) -> dict[str, str]:
    """What data.json is to say of them: digest by path below the folder."""
    return digest_tree(folder) if folder.is_dir() else {}


def open_task(run: Run, root: Path) -> Task:
    """The task as every step after prepare works with it."""
    task = load_task(run.config.task, root)
    if isinstance(task, HasFiles):
        task.use_files(companions_of(run))
    return task


def companions_of(run: Run) -> Path:
    """The folder, every file of it as prepare left it."""
    folder, report = run.output("prepare") / FOLDER, run.output("prepare") / "data.json"
    if not report.is_file():
        raise DataError(f"{report}: not there, so nothing says which files the task shares; run the prepare step first")
    recorded: Mapping[str, Any] = json.loads(report.read_text()).get(KEY, {})
    found = companions_in(folder)
    if changed := sorted(name for name in recorded.keys() | found.keys() if recorded.get(name) != found.get(name)):
        raise DataError(f"{folder / changed[0]}: not as prepare left it; `pipe run all` makes it again")
    return folder


def _check_plain(folder: Path) -> None:
    """A link's target would be neither digested nor there in a pod."""
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise DataError(f"make_files() left {path.relative_to(folder)}, which is no plain file; write a copy of it")
