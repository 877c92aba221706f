"""Write files atomically, compute SHA-256 digests of files, directories and named parts, and lock files.

The kernel releases a lock when its process ends; there are file systems without locks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from pipeline.system.errors import ConfigError, PipelineError, ResourceError


def write_atomic(path: Path, data: str | bytes) -> None:
    """Write to a temporary file, fsync and rename: a reader sees the old content or the new, never a part."""
    body = data.encode() if isinstance(data, str) else data
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    sync(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write deterministic JSON, so that equal content has an equal digest; NaN is an error."""
    write_atomic(path, json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n")


def read_object(path: Path, *keys: str, remedy: str = "") -> Any:
    """Return the JSON object in a file of a run, or what the keys lead to in it; raise where that is damaged."""
    reason = "it is missing"
    try:
        raw = path.read_bytes()
        reason = "not a JSON object" if raw.strip(b"\0 \n") else "it is empty"
        value: Any = {**json.loads(raw)}
        for key in keys:
            reason = f"it has no {key}"
            value = value[key]
        return value
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        run = next((folder.name for folder in path.parents if (folder / "run.json").is_file()), "")
        remedy = remedy or (f"`pipe run --resume {run}`, which writes it again" if run else "restore it from a copy")
        raise PipelineError(f"{path}: damaged: {reason}; to fix it: {remedy}") from error


def unwritable(path: Path, error: OSError) -> ResourceError:
    """Return an error with the reason: a file in place of a folder, permissions, a full disk."""
    file = f"{error.filename}: " if error.filename not in (None, str(path)) else ""
    reason = os.strerror(error.errno or 0).lower()
    return ResourceError(f"cannot write {path}: {file}{reason}; to fix it: correct that, then `pipe run --resume`")


def sync(path: Path) -> None:
    """Make the content of a file, or a rename in a directory, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(directory: Path) -> None:
    """Sync every file below a directory, and the directories themselves."""
    for path in (*directory.rglob("*"), directory):
        sync(path)


def digest_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def digest_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_parts(parts: Iterable[bytes | str]) -> str:
    """Return the digest of a sequence; each part is length-prefixed, so ("ab", "c") and ("a", "bc") differ."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.hexdigest()


def digest_mapping(parts: Mapping[str, str]) -> str:
    """Return the digest of named parts, independent of their order."""
    return digest_parts(item for name in sorted(parts) for item in (name, parts[name]))


def digest_tree(directory: Path) -> dict[str, str]:
    """Return the digest of every regular file below a directory by relative path, sorted."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and not path.is_symlink())
    return {path.relative_to(directory).as_posix(): digest_file(path) for path in files}


def empty_folders(directory: Path) -> tuple[str, ...]:
    """Return the relative paths of all folders below a directory that hold nothing, sorted."""
    folders = sorted(path for path in directory.rglob("*") if path.is_dir() and not path.is_symlink())
    return tuple(path.relative_to(directory).as_posix() for path in folders if not any(path.iterdir()))


TOKENIZER_FILE = "tokenizer.json"


def tokenizer_ids(path: Path) -> list[int]:
    """Return all ids of a tokenizer.json of the `tokenizers` package, special tokens included."""
    try:
        body: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = body["model"]["vocab"]
        vocabulary_ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary)))
        return [0, *vocabulary_ids, *(token["id"] for token in body.get("added_tokens") or [])]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not a tokenizer of the `tokenizers` package: {error!r}") from error


# Errors of a file system without locks (Lustre mounted without `flock`, NFS without lockd) or hard links (a bucket).
NOT_SUPPORTED = (errno.EPERM, errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP)


def lock_file(file: IO[str], operation: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file as `fcntl.flock` does; return False where the file system has no locks."""
    try:
        fcntl.flock(file, operation)
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            raise
        return False
    return True


@contextlib.contextmanager
def exclusive_lock(path: Path, need: str = "") -> Iterator[None]:
    """Lock a file for a short time; wait for it.

    Where there are no locks, raise an error that ends with the `need` for one and what to do; without a need, go on.
    """
    with path.open("a+") as file:
        if not lock_file(file) and need:
            raise no_locks(path.parent, need)
        yield


def no_locks(folder: Path, need: str) -> ResourceError:
    return ResourceError(f"{folder}: this file system has no locks, {need}")
