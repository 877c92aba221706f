"""Ends training when a process hangs: a thread in each tells where it stands and, when nobody moves, who is to blame.

Positions are files of the run directory: they outlive whoever hangs, which a store in one of the processes does not.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from pipeline.spec.errors import StageError, write_error
from pipeline.spec.run import Run
from train.group import Group
from train.standstill import Doing, Report, culprits, locate, sentence
from train.watch import Watch

_ROUNDS = 20  # within the timeout
_LONGEST_ROUND_SECONDS = 5.0
_SILENT_ROUNDS = 5  # without a word from a process that is still there


@contextlib.contextmanager
def watched(group: Group, run: Run, root: Path, timeout_seconds: int) -> Iterator[None]:
    """Within, a standstill of all processes is told and ended; a process alone waits for nobody."""
    if group.size == 1:
        yield
        return
    directory = run.path / "logs" / "positions"
    directory.mkdir(parents=True, exist_ok=True)
    watchman = Watchman(group, directory, root, timeout_seconds)
    thread = threading.Thread(target=watchman.serve, args=(run,), name="watchman", daemon=True)
    watchman.publish()
    thread.start()
    yield
    watchman.done.set()
    thread.join()
    watchman.path(group.rank.rank).unlink()


class Watchman:
    def __init__(self, group: Group, directory: Path, root: Path, timeout_seconds: float) -> None:
        self._watch: Watch = group.watch
        self._size, self._directory, self._root, self._timeout = group.size, directory, root, timeout_seconds
        self._main = threading.main_thread().ident
        self._seen: tuple[object, Doing] = (None, Doing.OUR_CODE)
        self._since = time.monotonic()
        self._own = Report(group.rank.rank, socket.gethostname(), os.getpid(), 0, 0, "start", Doing.OUR_CODE, "", 0.0)
        self._known: dict[int, Report] = {}
        self._quiet: dict[int, int] = {}  # rounds without news, by rank
        self.done = threading.Event()

    def serve(self, run: Run) -> None:
        pause = min(self._timeout / _ROUNDS, _LONGEST_ROUND_SECONDS)
        while not self.done.wait(pause):
            if text := self.look():
                _end(StageError(text), run.partial("train"))

    def look(self) -> str:
        """Tell the others where this process stands; a sentence when it waits in vain."""
        self.publish()
        if self._own.still_seconds < self._timeout - _SILENT_ROUNDS * self._timeout / _ROUNDS:
            self._quiet.clear()
            return ""
        reports = [self._hear(rank) for rank in range(self._size)]
        if self._own.still_seconds < self._timeout:
            return ""
        silent = {rank for rank, rounds in self._quiet.items() if rounds >= _SILENT_ROUNDS}
        found = culprits(reports, silent, self._timeout)
        return sentence(reports, found, silent) if found else ""

    def publish(self) -> None:
        doing, place = locate(sys._current_frames().get(self._main or 0), self._root)
        position, now = self._watch.position, time.monotonic()
        if self._seen[0] is not position or self._seen[1] != doing:
            self._seen, self._since = (position, doing), now
        step, phase = position
        self._own = replace(
            self._own,
            beat=self._own.beat + 1,
            step=step,
            phase=phase,
            doing=doing,
            place=place,
            still_seconds=now - self._since,
        )
        path = self.path(self._own.rank)
        with contextlib.suppress(OSError):  # a full disk is told by those who must write; this is only a position
            path.with_suffix(".new").write_text(json.dumps(asdict(self._own)))
            path.with_suffix(".new").replace(path)

    def path(self, rank: int) -> Path:
        return self._directory / f"{rank}.json"

    def _hear(self, rank: int) -> Report:
        """What a process told last; how often it told the same is counted."""
        if rank == self._own.rank:
            return self._own
        before = self._known.get(rank)
        try:
            body = json.loads(self.path(rank).read_text())
            told = Report(**{**body, "doing": Doing(body["doing"])})
        except (OSError, ValueError):
            told = before or Report(rank, "an unknown host", 0, 0, 0, "start", Doing.OUR_CODE, "", 0.0)
        self._quiet[rank] = self._quiet.get(rank, 0) + 1 if before is not None and before.beat == told.beat else 0
        self._known[rank] = told
        return told


def _end(error: StageError, directory: Path) -> None:
    """Of a process whose main thread may never come back."""
    try:
        print(f"error: {error}", file=sys.stderr, flush=True)
        write_error(error, directory)
    finally:
        os._exit(error.exit_code)
