"""`manifest.json`: how far training had come, and size and SHA-256 of every file. A checkpoint without it is none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.spec.digest import digest_bytes
from pipeline.spec.errors import StageError
from train.state import Progress

NAME = "manifest.json"


class Damaged(StageError):
    """A checkpoint that is not what was written; an older one may be whole."""


@dataclass(frozen=True)
class Written:
    """One file of a checkpoint."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    progress: Progress
    scaler: Mapping[str, Any]
    identity: Mapping[str, Any]  # what the order of samples depends on: it must not change under a checkpoint
    world_size: int
    files: tuple[Written, ...]  # by rank

    def encode(self) -> bytes:
        """With a digest of its own content: a flipped byte is found in it, too."""
        text = _canonical(asdict(self))
        return f'{{"content": {text},\n"sha256": "{digest_bytes(text.encode())}"}}\n'.encode()


def decode(raw: bytes) -> Manifest:
    try:
        body = json.loads(raw)
        content = body["content"]
        if digest_bytes(_canonical(content).encode()) != body["sha256"]:
            raise Damaged("the digest of its manifest does not match")
        files = tuple(Written(**file) for file in content["files"])
        return Manifest(**{**content, "progress": Progress(**content["progress"]), "files": files})
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"its manifest cannot be read ({error})") from error


def _canonical(content: Mapping[str, Any]) -> str:
    return json.dumps(content, sort_keys=True, allow_nan=False)
