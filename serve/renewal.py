"""Files that may change under a running service, such as keys and certificates: looked at now and then, read anew."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.spec.errors import PipelineError

_SECONDS = 5.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Renewed:
    """`reload` raises PipelineError and changes nothing where the files are wrong."""

    what: str
    paths: tuple[Path, ...]
    reload: Callable[[], None]


async def keep(renewed: Sequence[Renewed], seconds: float = _SECONDS) -> None:
    """Until it is cancelled. Files that are wrong are said once for each change of theirs."""
    seen = {one: _state(one) for one in renewed}
    while True:
        await asyncio.sleep(seconds)
        for one in renewed:
            if (state := _state(one)) == seen[one]:
                continue
            seen[one] = state
            try:
                one.reload()
            except PipelineError as error:
                log.error("%s changed and cannot be used, the old one stays: %s", one.what, error)
            else:
                log.info("%s changed: the new one is in use", one.what)


def _state(one: Renewed) -> tuple[tuple[int, int, int] | None, ...]:
    """What changes with a file's content, also where a mounted Secret swaps a symbolic link."""
    return tuple(_stat(path) for path in one.paths)


def _stat(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
