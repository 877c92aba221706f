"""`logs/stalls/N.txt` of a run: what every process was at when all stood still."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

from train.standstill import Report, Standstill, sentence


class Stalls:
    """The reports of a run, numbered from 1; all processes of one launch write their only one under one number."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / f"{1 + len(list(directory.glob('*.txt')))}.txt"

    def write(self, found: Standstill, more: Callable[[Report], str]) -> Path:
        """`more` is what this process can find out about another. The first one's report is kept: all saw the same."""
        text = "\n".join([sentence(found) + "\n", *(_section(one, found, more(one)) for one in found.reports)])
        aside = self._path.with_name(f".{self._path.stem}-{socket.gethostname()}-{os.getpid()}")
        aside.write_text(text)
        with contextlib.suppress(FileExistsError):  # link() never replaces
            os.link(aside, self._path)
        aside.unlink()
        return self._path


def _section(one: Report, found: Standstill, more: str) -> str:
    mark = "  <- waited for" if one in found.culprits else ""
    head = f"== rank {one.rank} on {one.host} (process {one.pid}), still for {one.still_seconds:.1f} s{mark}"
    facts = [f"at step {one.step}, {one.phase}", one.place and f"place: {one.place}"]
    facts += [one.exchanges and f"unfinished: {one.exchanges}", more, one.stacks]
    return "\n".join([head, *(fact for fact in facts if fact)]) + "\n"
