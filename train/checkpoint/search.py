"""Which checkpoint is whole: every file is as long as it was, with the digest it had."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from pipeline.spec.errors import StageError
from train.checkpoint.manifest import Damaged, Manifest, Written, decode
from train.checkpoint.place import Place
from train.checkpoint.saved import Saved
from train.group import Group


def find_newest(place: Place, identity: Mapping[str, Any], group: Group) -> Saved | None:
    """All take part, each looks at its share of the files."""
    for step in reversed(group.share(place.steps() if group.rank.first else [])):
        try:
            manifest = _checked_by_all(place, step, identity, group)
            if manifest.progress.best_step not in (0, step):
                _checked_by_all(place, manifest.progress.best_step, identity, group)
        except StageError as error:
            if group.rank.first:
                print(f"warning: {error}; skipped", file=sys.stderr)
        else:
            return Saved(place, manifest)
    return None


def open_whole(place: Place, step: int, identity: Mapping[str, Any]) -> Saved:
    """A checkpoint that this process looked at by itself."""
    manifest = _read(place, step, identity)
    if problem := problem_of(place, step, manifest.files):
        raise _damaged(step, problem)
    return Saved(place, manifest)


def best_of(place: Place, step: int) -> int:
    """The step of the best checkpoint that one refers to; 0 when it cannot tell."""
    try:
        return decode(place.manifest(step)).progress.best_step
    except (OSError, Damaged):
        return 0


def _checked_by_all(place: Place, step: int, identity: Mapping[str, Any], group: Group) -> Manifest:
    """The same on every process, and the same error."""
    found: Manifest | StageError
    try:
        found = _read(place, step, identity)
    except StageError as error:
        found = error
    found = group.share(found)
    if isinstance(found, StageError):
        raise found
    mine = found.files[group.rank.rank :: group.size]
    for problem in group.gather(problem_of(place, step, mine)):
        if problem:
            raise _damaged(step, problem)
    return found


def _read(place: Place, step: int, identity: Mapping[str, Any]) -> Manifest:
    try:
        manifest = decode(place.manifest(step))
    except (OSError, Damaged) as error:
        raise _damaged(step, error) from error
    if manifest.identity != identity:
        raise StageError(f"checkpoint step-{step:08d} belongs to other data or another batch order")
    return manifest


def problem_of(place: Place, step: int, files: Iterable[Written]) -> str:
    """Of the first file that is not what was written."""
    try:
        for file in files:
            content = place.read(step, file.name)
            if len(content) != file.bytes or hashlib.sha256(content.numpy().data).hexdigest() != file.sha256:
                return f"the digest of {file.name} does not match"
    except (OSError, RuntimeError) as error:  # torch's own, where a file cannot be mapped
        return str(error)
    return ""


def _damaged(step: int, why: object) -> Damaged:
    return Damaged(f"checkpoint step-{step:08d} is damaged: {why}")
