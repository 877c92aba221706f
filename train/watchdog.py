"""The watchdog ends training when a process hangs: a thread in each process reports where it is and reads the others.

Positions are files of the run directory: they outlive a process that hangs, which a store inside one of the processes
would not. The report is `logs/stalls/N.txt` of the run.
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

from pipeline.contract.restarts import POSITIONS
from pipeline.contract.run import Run
from pipeline.system.errors import StageError, Stalled, write_error
from train.hang_report import (
    Activity,
    Hang,
    ProcessReport,
    StackDump,
    culprits,
    describe_collectives,
    describe_hang,
    is_checkpointing,
    is_mismatch,
    is_network_cut,
    kernel_state,
    locate,
    numbered_calls,
    process_start,
    silence_reason,
    thread_stacks,
    unfinished_collectives,
    waits_on_gpu,
)
from train.process_group import Heartbeat, ProcessGroup

_ROUNDS = 20  # within the timeout
_MAX_ROUND_SECONDS = 5.0
_SILENT_ROUNDS = 5  # without a report from a process
_SUSPECT = 1 - _SILENT_ROUNDS / _ROUNDS  # share of the timeout after which a lack of progress is investigated


@contextlib.contextmanager
def run_watchdog(group: ProcessGroup, run: Run, root: Path, timeout_seconds: int) -> Iterator[None]:
    """Report and end a hang of all processes within; a single process has none to wait for."""
    if group.size == 1:
        yield
        return
    directory = run.path / POSITIONS
    directory.mkdir(parents=True, exist_ok=True)
    watchdog = Watchdog(group, directory, root, timeout_seconds)
    reports = HangReports(run.path / "logs" / "stalls")
    thread = threading.Thread(target=watchdog.serve, args=(run, reports), name="watchdog", daemon=True)
    watchdog.publish()
    thread.start()
    yield
    watchdog.done.set()
    thread.join()
    watchdog.remove_files()


class Watchdog:
    """Publishes where this process is, and reads where the others are."""

    def __init__(self, group: ProcessGroup, directory: Path, root: Path, timeout_seconds: float) -> None:
        self._heartbeat: Heartbeat = group.heartbeat
        self._size, self._directory, self._root, self._timeout = group.size, directory, root, timeout_seconds
        self._main = threading.main_thread().ident
        self._seen: tuple[object, Activity] = (None, Activity.PIPE_CODE)
        self._since = time.monotonic()
        self._own = _no_report(group.rank.rank, socket.gethostname(), os.getpid(), process_start())
        self._reports: dict[int, ProcessReport] = {}
        self._silent_rounds: dict[int, int] = {}  # rounds without a new report, by rank
        self._stack_dump = StackDump(self._stack_file(self._own.rank), _SUSPECT * timeout_seconds)
        self.done = threading.Event()

    def serve(self, run: Run, hang_reports: HangReports) -> None:
        pause = min(self._timeout / _ROUNDS, _MAX_ROUND_SECONDS)
        while not self.done.wait(pause):
            self._stack_dump.rearm()
            if hang := self.check():
                self._end(hang, run, hang_reports)

    def check(self) -> Hang | None:
        """Publish where this process is; return the hang when it waits for too long."""
        self.publish()
        if not self._suspicious:
            self._silent_rounds.clear()
            return None
        reports = [self._read_report(rank) for rank in range(self._size)]
        if self._own.still_seconds < self._timeout:
            return None
        silent_reports = [report for report in reports if self._silent_rounds.get(report.rank, 0) >= _SILENT_ROUNDS]
        silent = {
            report.rank: silence_reason(report.pid, report.started) if self._is_here(report) else ""
            for report in silent_reports
        }
        culprit_reports = culprits(reports, silent, self._timeout)
        if not culprit_reports and (silent or not is_network_cut(reports, self._timeout)):
            return None
        return Hang(reports, culprit_reports, silent)

    def publish(self) -> None:
        position, now = self._heartbeat.position, time.monotonic()
        activity, place = self._locate(saves=position[1] == "checkpoint")
        if self._seen[0] is not position or self._seen[1] != activity:
            self._seen, self._since = (position, activity), now
        step, phase = position
        self._own = replace(
            self._own,
            beat=self._own.beat + 1,
            step=step + 1,
            phase=phase,
            activity=activity,
            place=place,
            still_seconds=now - self._since,
            exchanges="",
            calls={},
            stacks="",
        )
        if self._suspicious:
            collectives = unfinished_collectives()
            exchanges, calls = describe_collectives(collectives), numbered_calls(collectives)
            self._own = replace(self._own, exchanges=exchanges, calls=calls, stacks=thread_stacks())
            if waits_on_gpu(collectives):
                self._own = replace(self._own, activity=Activity.WAITING)
        path = self.path(self._own.rank)
        with contextlib.suppress(OSError):  # a full disk is reported by other writers; this is only a position
            path.with_suffix(".new").write_text(json.dumps(asdict(self._own)))
            path.with_suffix(".new").replace(path)

    def path(self, rank: int) -> Path:
        return self._directory / f"{rank}.json"

    def remove_files(self) -> None:
        self._stack_dump.remove()
        self.path(self._own.rank).unlink()

    def _locate(self, saves: bool) -> tuple[Activity, str]:
        """Return what the main thread is doing, or, at a checkpoint, the thread that it may wait for."""
        frames = sys._current_frames()
        activity = locate(frames.get(self._main or 0), self._root)
        if saves and activity[0] is Activity.PIPE_CODE:
            checkpoint_frames = (
                frame for number, frame in frames.items() if number != self._main and is_checkpointing(frame)
            )
            activity = next((locate(frame, self._root) for frame in checkpoint_frames), activity)
        return activity

    @property
    def _suspicious(self) -> bool:
        return self._own.still_seconds >= _SUSPECT * self._timeout

    def _read_report(self, rank: int) -> ProcessReport:
        """Return a process's last report, and count the rounds without a new one."""
        if rank == self._own.rank:
            return self._own
        previous = self._reports.get(rank)
        try:
            body = json.loads(self.path(rank).read_text())
            report = ProcessReport(**{**body, "activity": Activity(body["activity"])})
        except (OSError, ValueError):
            report = previous or _no_report(rank, "an unknown host", 0, 0.0)
        self._silent_rounds[rank] = (
            self._silent_rounds.get(rank, 0) + 1 if previous is not None and previous.beat == report.beat else 0
        )
        self._reports[rank] = report
        return report

    def _end(self, hang: Hang, run: Run, hang_reports: HangReports) -> None:
        """Write the report and exit, as the main thread may be blocked; the launcher ends the others."""
        try:
            path = hang_reports.write(hang, self._describe_locally).relative_to(run.path)
            kind = StageError if is_mismatch(hang) else Stalled  # another attempt would end in the same way
            error = kind(f"{describe_hang(hang)}; what each process was doing is in {path} of the run")
            print(f"error: {error}", file=sys.stderr, flush=True)
            write_error(error, run.partial("train"))
        finally:
            os._exit(Stalled.exit_code)

    def _describe_locally(self, report: ProcessReport) -> str:
        """Return what this machine knows of a process: the kernel's view, and the stacks of a blocked interpreter."""
        facts = [f"kernel: {kernel_state(report.pid)}"] if self._is_here(report) else []
        with contextlib.suppress(OSError):
            facts.append(self._stack_file(report.rank).read_text())
        return "\n".join(fact for fact in facts if fact)

    def _is_here(self, report: ProcessReport) -> bool:
        return report.host == self._own.host

    def _stack_file(self, rank: int) -> Path:
        return self._directory / f"{rank}.frozen"


def _no_report(rank: int, host: str, pid: int, started: float) -> ProcessReport:
    return ProcessReport(rank, host, pid, started, 0, 0, "start", Activity.PIPE_CODE, "", 0.0)


class HangReports:
    """The hang reports of a run, numbered from 1; all processes of one launch write theirs under one number."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / f"{1 + len(list(directory.glob('*.txt')))}.txt"

    def write(self, hang: Hang, describe_locally: Callable[[ProcessReport], str]) -> Path:
        """Write the report unless another process has: all of them see the same hang."""
        sections = [_section(report, hang, describe_locally(report)) for report in hang.reports]
        text = "\n".join([describe_hang(hang) + "\n", *sections])
        with contextlib.suppress(FileExistsError), self._path.open("x") as file:
            file.write(text)
        return self._path


def _section(report: ProcessReport, hang: Hang, local_facts: str) -> str:
    suffix = "  <- waited for" if report in hang.culprits else ""
    heading = (
        f"== rank {report.rank} on {report.host} (process {report.pid}), still for {report.still_seconds:.1f} s{suffix}"
    )
    facts = [f"at step {report.step}, {report.phase}", report.place and f"place: {report.place}"]
    facts += [report.exchanges and f"unfinished: {report.exchanges}", local_facts, report.stacks]
    return "\n".join([heading, *(fact for fact in facts if fact)]) + "\n"
