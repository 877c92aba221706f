"""Pretrained weights: find them, and record the digests that training must find again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.contract.config import Config
from pipeline.contract.pretrained import (
    PRETRAINED_RECORD,
    WEIGHT_FILE,
    Pretrained,
    check_trained,
    commit_of,
    hub_id,
    locate_pretrained,
    open_pretrained,
)
from pipeline.contract.run import Run
from pipeline.system.errors import ConfigError
from pipeline.system.files import digest_file, digest_mapping, write_atomic, write_json

PRETRAINED_KEY = "pretrained"  # in data.json
_DIGEST_CACHE = ".pretrained-digests.json"  # in the folder of runs


def record(pretrained: Pretrained, directory: Path) -> str:
    """Write the digests of all files that training reads; return the digest of them all."""
    digests = {name: digest_file(path) for name, path in pretrained.files.items()}
    run = Run(pretrained.folder.resolve()) if pretrained.is_run else None
    if run:
        check_trained(run, digests[WEIGHT_FILE])
    body = {
        "commit": commit_of(pretrained.folder),
        "run": run.id if run else "",
        "digest": digest_mapping(digests),
        "files": {
            name: {"sha256": digests[name], "bytes": path.stat().st_size} for name, path in pretrained.files.items()
        },
    }
    write_json(directory / PRETRAINED_RECORD, body)
    return str(body["digest"])


def find_pretrained(config: Config, root: Path) -> Pretrained | None:
    return open_pretrained(locate_pretrained(config.model, root)) if config.model.pretrained else None


def pretrained_parts(config: Config, root: Path, runs: Path) -> dict[str, str]:
    """Return the parts of prepare's key: the digests of a folder's files.

    Nothing for a hub id: prepare records the commit of its revision, and later steps use that one.
    """
    if not config.model.pretrained or hub_id(config.model, root):
        return {}
    return _digests(open_pretrained(locate_pretrained(config.model, root)).files, runs / _DIGEST_CACHE)


def _digests(files: Mapping[str, Path], cache: Path) -> dict[str, str]:
    """Hash the files; weights may be large, so a file is read again only when its path, size or times have changed."""
    cached = _read_cache(cache)
    states = {name: _file_state(path) for name, path in files.items()}
    digests = {
        name: cached[states[name]] if states[name] in cached else digest_file(path) for name, path in files.items()
    }
    new_entries = {states[name]: digest for name, digest in digests.items()}
    if cache.parent.is_dir() and not new_entries.items() <= cached.items():
        write_atomic(cache, json.dumps({**cached, **new_entries}, indent=1, sort_keys=True))
    return digests


def _file_state(path: Path) -> str:
    """Describe a file by path, inode, size and times; unlike mtime, ctime cannot be set by hand."""
    path = path.resolve()
    status = path.stat()
    return f"{path} {status.st_dev}:{status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def _read_cache(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    try:
        body: Any = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path}: damaged ({error}); to fix it: delete it, the digests are computed again") from error
    return dict(body)
