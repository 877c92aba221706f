"""Ends training when a process hangs: a thread in each tells where it stands and, when nobody moves, who is to blame.

Positions are files of the run directory: they outlive whoever hangs, which a store in one of the processes does not.

`logs/stalls/N.txt` of a run: what every process was at when all stood still.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

from pipeline.contract.errors import Stalled, write_error
from pipeline.contract.run import Run
from train.hang_report import (
    Doing,
    Report,
    Standstill,
    Tripwire,
    culprits,
    cut_off,
    keeps_state,
    kernel_state,
    locate,
    process_start,
    put_down,
    sentence,
    stacks,
    unfinished,
    why_silent,
)
from train.process_group import Group, Watch

_ROUNDS = 20  # within the timeout
_LONGEST_ROUND_SECONDS = 5.0
_SILENT_ROUNDS = 5  # without a word from a process that is still there
_SUSPECT = 1 - _SILENT_ROUNDS / _ROUNDS  # part of the timeout after which standing still is looked into


@contextlib.contextmanager
def watched(group: Group, run: Run, root: Path, timeout_seconds: int) -> Iterator[None]:
    """Within, a standstill of all processes is told and ended; a process alone waits for nobody."""
    if group.size == 1:
        yield
        return
    directory = run.path / "logs" / "positions"
    directory.mkdir(parents=True, exist_ok=True)
    watchman = Watchman(group, directory, root, timeout_seconds)
    stalls = Stalls(run.path / "logs" / "stalls")
    thread = threading.Thread(target=watchman.serve, args=(run, stalls), name="watchman", daemon=True)
    watchman.publish()
    thread.start()
    yield
    watchman.done.set()
    thread.join()
    watchman.forget()


class Watchman:
    def __init__(self, group: Group, directory: Path, root: Path, timeout_seconds: float) -> None:
        self._watch: Watch = group.watch
        self._size, self._directory, self._root, self._timeout = group.size, directory, root, timeout_seconds
        self._main = threading.main_thread().ident
        self._seen: tuple[object, Doing] = (None, Doing.OUR_CODE)
        self._since = time.monotonic()
        self._own = _unheard(group.rank.rank, socket.gethostname(), os.getpid(), process_start())
        self._known: dict[int, Report] = {}
        self._quiet: dict[int, int] = {}  # rounds without news, by rank
        self._tripwire = Tripwire(self._frozen(self._own.rank), _SUSPECT * timeout_seconds)
        self.done = threading.Event()

    def serve(self, run: Run, stalls: Stalls) -> None:
        pause = min(self._timeout / _ROUNDS, _LONGEST_ROUND_SECONDS)
        while not self.done.wait(pause):
            self._tripwire.rearm()
            if found := self.look():
                self._end(found, run, stalls)

    def look(self) -> Standstill | None:
        """Tell the others where this process stands; what there is to say when it waits in vain."""
        self.publish()
        if not self._suspicious:
            self._quiet.clear()
            return None
        reports = [self._hear(rank) for rank in range(self._size)]
        if self._own.still_seconds < self._timeout:
            return None
        quiet = [one for one in reports if self._quiet.get(one.rank, 0) >= _SILENT_ROUNDS]
        silent = {one.rank: why_silent(one.pid, one.started) if self._is_here(one) else "" for one in quiet}
        found = culprits(reports, silent, self._timeout)
        if not found and (silent or not cut_off(reports, self._timeout)):
            return None
        return Standstill(reports, found, silent)

    def publish(self) -> None:
        position, now = self._watch.position, time.monotonic()
        doing, place = self._locate(saves=position[1] == "checkpoint")
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
        detail = (unfinished(), stacks()) if self._suspicious else ("", "")
        self._own = replace(self._own, exchanges=detail[0], stacks=detail[1])
        path = self.path(self._own.rank)
        with contextlib.suppress(OSError):  # a full disk is told by those who must write; this is only a position
            path.with_suffix(".new").write_text(json.dumps(asdict(self._own)))
            path.with_suffix(".new").replace(path)

    def path(self, rank: int) -> Path:
        return self._directory / f"{rank}.json"

    def forget(self) -> None:
        """Training has ended well."""
        self._tripwire.remove()
        self.path(self._own.rank).unlink()

    def _locate(self, saves: bool) -> tuple[Doing, str]:
        """What the main thread is at, or the thread it may wait for when a checkpoint is due."""
        frames = sys._current_frames()
        found = locate(frames.get(self._main or 0), self._root)
        if saves and found[0] is Doing.OUR_CODE:
            working = (frame for number, frame in frames.items() if number != self._main and keeps_state(frame))
            found = next((locate(frame, self._root) for frame in working), found)
        return found

    @property
    def _suspicious(self) -> bool:
        return self._own.still_seconds >= _SUSPECT * self._timeout

    def _hear(self, rank: int) -> Report:
        """What a process told last; how often it told the same is counted."""
        if rank == self._own.rank:
            return self._own
        before = self._known.get(rank)
        try:
            body = json.loads(self.path(rank).read_text())
            told = Report(**{**body, "doing": Doing(body["doing"])})
        except (OSError, ValueError):
            told = before or _unheard(rank, "an unknown host", 0, 0.0)
        self._quiet[rank] = self._quiet.get(rank, 0) + 1 if before is not None and before.beat == told.beat else 0
        self._known[rank] = told
        return told

    def _end(self, found: Standstill, run: Run, stalls: Stalls) -> None:
        """Of this process, whose main thread may never come back, and of those here that cannot end themselves."""
        try:
            path = stalls.write(found, self._more).relative_to(run.path)
            error = Stalled(f"{sentence(found)}; what each process was at is in {path} of the run")
            print(f"error: {error}", file=sys.stderr, flush=True)
            write_error(error, run.partial("train"))
            for one in found.culprits:
                if one.rank in found.silent and self._is_here(one):
                    put_down(one.pid, one.started)
        finally:
            os._exit(Stalled.exit_code)

    def _more(self, one: Report) -> str:
        """What this machine knows of a process: its kernel's view, and the stacks of a blocked interpreter."""
        found = [f"kernel: {kernel_state(one.pid)}"] if self._is_here(one) else []
        with contextlib.suppress(OSError):
            found.append(self._frozen(one.rank).read_text())
        return "\n".join(text for text in found if text)

    def _is_here(self, one: Report) -> bool:
        return one.host == self._own.host

    def _frozen(self, rank: int) -> Path:
        return self._directory / f"{rank}.frozen"


def _unheard(rank: int, host: str, pid: int, started: float) -> Report:
    return Report(rank, host, pid, started, 0, 0, "start", Doing.OUR_CODE, "", 0.0)


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
