"""The token of the admin interface: a file that its owner alone can read."""

from __future__ import annotations

import hmac
import os
import stat
from pathlib import Path

from pipeline.spec.errors import ConfigError

_SHORTEST = 32


def read_token(path: Path) -> str:
    """Refused where others could have read it."""
    try:
        with path.open() as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--admin-token {path}: cannot be read ({error})") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"--admin-token {path}: others may read it; chmod 600 {path}")
    if len(text) < _SHORTEST:
        raise ConfigError(f"--admin-token {path}: shorter than {_SHORTEST} characters; write a random one")
    return text


def opens(given: bytes, token: str) -> bool:
    """Whether an `authorization` header carries it; the time it takes tells nothing."""
    return hmac.compare_digest(given, b"Bearer " + token.encode())
