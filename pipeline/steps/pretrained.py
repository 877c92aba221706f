"""Pretrained weights before training: their small files are kept by prepare, and all they are is recorded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.contract.config import Config
from pipeline.contract.errors import ConfigError
from pipeline.contract.files import digest_file, digest_mapping, write_atomic, write_json
from pipeline.contract.pretrained import (
    RECORD,
    SINGLE,
    Pretrained,
    check_trained,
    commit_of,
    hub_id,
    locate,
    open_pretrained,
)
from pipeline.contract.run import Run

PRETRAINED_KEY = "pretrained"  # in data.json
_KNOWN = ".pretrained-digests.json"  # in the folder of runs


def copy_small_files(found: Pretrained, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, path in found.small.items():
        shutil.copyfile(path, folder / name)


def record(found: Pretrained, directory: Path) -> str:
    """What training must find again; returns the digest of everything that is read."""
    digests = {name: digest_file(path) for name, path in found.files.items()}
    run = Run(found.folder.resolve()) if found.of_run else None
    if run:
        check_trained(run, digests[SINGLE])
    body = {
        "commit": commit_of(found.folder),
        "run": run.id if run else "",
        "digest": digest_mapping(digests),
        "files": {name: {"sha256": digests[name], "bytes": path.stat().st_size} for name, path in found.files.items()},
    }
    write_json(directory / RECORD, body)
    return str(body["digest"])


def find_pretrained(config: Config, root: Path) -> Pretrained | None:
    return open_pretrained(locate(config.model, root)) if config.model.pretrained else None


def pretrained_parts(config: Config, root: Path, runs: Path) -> dict[str, str]:
    """Of prepare's key: the digests of a folder's files.

    A hub id is its own part, with the revision: which commit a branch was, the first prepare has recorded, and every
    later step keeps to it.
    """
    if not config.model.pretrained or hub_id(config.model, root):
        return {}
    return _digests(open_pretrained(locate(config.model, root)).files, runs / _KNOWN)


def _digests(files: Mapping[str, Path], known: Path) -> dict[str, str]:
    """Weights may be hundreds of GB: a file is read again only when its size, place or times have changed."""
    before = _read_known(known)
    stands = {name: _stand(path) for name, path in files.items()}
    found = {
        name: before[stands[name]] if stands[name] in before else digest_file(path) for name, path in files.items()
    }
    fresh = {stands[name]: digest for name, digest in found.items()}
    if known.parent.is_dir() and not fresh.items() <= before.items():
        write_atomic(known, json.dumps({**before, **fresh}, indent=1, sort_keys=True))
    return found


def _stand(path: Path) -> str:
    """The time of the last change of an inode cannot be set by hand."""
    path = path.resolve()
    now = path.stat()
    return f"{path} {now.st_dev}:{now.st_ino} {now.st_size} {now.st_mtime_ns} {now.st_ctime_ns}"


def _read_known(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    try:
        body: Any = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path}: damaged ({error}); delete it, digests are then reckoned again") from error
    return dict(body)
