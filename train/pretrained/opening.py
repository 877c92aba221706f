"""The weights that prepare has recorded, found again by training and still the same."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.spec.digest import digest_file
from pipeline.spec.errors import DataError
from pipeline.spec.hub import locate
from pipeline.spec.pretrained import RECORD, Pretrained, open_pretrained
from pipeline.spec.run import Run
from train.group import Group
from train.pretrained.bare import Make
from train.pretrained.beginning import Beginning, from_files, from_nothing
from train.seeding import seed_step


@contextlib.contextmanager
def beginning_of(
    run: Run, root: Path, make: Make, group: Group, resumes: bool
) -> Iterator[Callable[[], Beginning] | None]:
    """What makes the model within this context; nothing where the task begins its own.

    A run that goes on takes all from its checkpoint: it looks for no pretrained files, which may be gone by then.
    """
    config = run.config
    if not config.model.pretrained:
        yield None
        return
    if resumes:
        yield partial(from_nothing, make)
        return
    recorded = json.loads((run.output("prepare") / RECORD).read_text())
    found = open_pretrained(locate(config.model, root, recorded["commit"], recorded["files"], recorded["run"]))
    before = _stands(found)
    check_recorded(found, recorded["files"], group)
    yield partial(from_files, make, found, config.model.allow, partial(seed_step, config.train.seed, -1, 0))
    if _stands(found) != before:
        raise DataError(f"{found.folder}: its files changed while they were read; leave them be, then `pipe run all`")
    if group.rank.first:
        print(f"begins with {config.model.pretrained}, digest {recorded['digest'][:12]}", flush=True)


def check_recorded(found: Pretrained, recorded: Mapping[str, Any], group: Group) -> None:
    """Each machine reads all of its files once: its processes share them out. All hear of every difference."""
    names = sorted(found.files.keys() | recorded.keys())
    rank = group.rank
    mine = names[rank.local_rank :: rank.local_size] if rank.local_size else names
    told = group.gather([problem for name in mine if (problem := _difference(name, found, recorded))])
    if problems := sorted({problem for problems in told for problem in problems}):
        raise DataError(f"{'; '.join(problems[:3])}; `pipe run all` prepares it anew")


def _difference(name: str, found: Pretrained, recorded: Mapping[str, Any]) -> str:
    path = found.files.get(name)
    if path is None or name not in recorded:
        return f"{found.folder / name}: {'gone' if path is None else 'new'} since prepare looked at it"
    wanted = recorded[name]
    if path.stat().st_size != wanted["bytes"]:
        return f"{path}: {path.stat().st_size} bytes, prepare found {wanted['bytes']}"
    if digest_file(path) != wanted["sha256"]:
        return f"{path}: changed since prepare looked at it"
    return ""


def _stands(found: Pretrained) -> list[tuple[int, ...]]:
    stats = [path.stat() for path in found.files.values()]
    return [(stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats]
