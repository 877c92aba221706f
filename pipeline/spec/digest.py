"""SHA-256 of files, directory trees and named parts: every link of the chain is one of these."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

_CHUNK_BYTES = 1 << 20


def digest_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def digest_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def digest_parts(parts: Iterable[bytes | str]) -> str:
    """Digest of a sequence; each part is length-prefixed, so ("ab", "c") and ("a", "bc") differ."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.hexdigest()


def digest_mapping(parts: Mapping[str, str]) -> str:
    """Digest of named parts, whatever their order."""
    return digest_parts(item for name in sorted(parts) for item in (name, parts[name]))


def digest_tree(directory: Path) -> dict[str, str]:
    """Relative path → digest of every regular file below a directory, sorted."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and not path.is_symlink())
    return {path.relative_to(directory).as_posix(): digest_file(path) for path in files}
