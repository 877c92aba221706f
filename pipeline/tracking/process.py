"""Start the processes that send a run to its trackers, pass on what they report, and wait for them at the end.

Each tracker has a process of its own: its client may be slow, hang or crash, and training does not notice.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from pipeline.contract.config import Config
from pipeline.contract.run import Run
from pipeline.executors.local import Report
from pipeline.system.errors import missing_extra
from pipeline.system.processes import describe_exit

MARK = "pipe: "  # beginning of a line for the user
TRACKED_STEPS = ("train", "evaluate", "export")  # a run in which none of these runs is not tracked
END_TIMEOUT_SECONDS = 300  # for the rest of a run, with its model
_FAILED_TIMEOUT_SECONDS = 30.0  # after a failure or Ctrl-C
_NOTE_SECONDS = 2.0
_POLL_SECONDS = 0.1


def check_trackers(config: Config) -> None:
    """Raise an error for a tracker whose client is not installed."""
    for name in config.external_trackers:
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # a folder `wandb` or `mlflow` without code may be in the project
            error = missing_extra(ModuleNotFoundError(name=name))
            assert error is not None
            raise error


def state_file(run: Run, name: str) -> Path:
    """Return the record of what a tracker has of a run."""
    return run.path / "tracking" / f"{name}.json"


class Tracking:
    """The processes that send one run to its trackers; none before `begin`."""

    def __init__(self, root: Path, run: Run, report: Report) -> None:
        self._root, self._run, self._report = root, run, report
        self._senders: list[_Sender] | None = None

    def begin(self, step: str) -> None:
        """Start the processes with the first step that counts, or continue runs that the trackers have already."""
        names = self._run.config.external_trackers
        if step in TRACKED_STEPS or any(state_file(self._run, name).exists() for name in names):
            self._senders = self._senders or [_Sender(name, self._root, self._run, self._report) for name in names]

    def tick(self) -> None:
        for sender in self._senders or ():
            sender.tick()

    def end(self, seconds: float) -> None:
        """Let the processes send the rest; Ctrl-C ends the wait."""
        senders = self._senders or []
        for sender in senders:
            sender.end_input()
        started, is_noted = time.monotonic(), False
        try:
            while (rest := [sender.name for sender in senders if sender.is_running]) and (
                time.monotonic() < started + seconds
            ):
                if not is_noted and time.monotonic() > started + _NOTE_SECONDS:
                    self._report(f"sending the rest to {' and '.join(rest)} (Ctrl-C: do not wait)")
                    is_noted = True
                time.sleep(_POLL_SECONDS)
                self.tick()
        except KeyboardInterrupt:
            pass
        for sender in senders:
            sender.stop()


class _Sender:
    """The process for one tracker; it ends when its standard input does, even if this process is killed."""

    def __init__(self, name: str, root: Path, run: Run, report: Report) -> None:
        self.name, self._run, self._report = name, run, report
        self._log = run.log(name)
        self._is_noted = False
        with self._log.open("ab") as log:
            self._position = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pipeline.tracking", name, str(run.path), "--root", str(root), "--follow"],
                cwd=root,
                env={**os.environ, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches only this process
            )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def tick(self) -> None:
        """Pass on the lines for the user, and report a process that ended too early."""
        with self._log.open("rb") as log:
            log.seek(self._position)
            data = log.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._position += len(complete)
        for line in complete.decode(errors="replace").splitlines():
            if line.startswith(MARK):
                self._report(line.removeprefix(MARK))
        if (status := self._process.poll()) not in (None, 0, 1) and not self._is_noted:
            self._is_noted = True
            self._warn(describe_exit("its process", status or 0))

    def end_input(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def stop(self) -> None:
        if self.is_running:
            self._process.kill()
            self._is_noted = True
            self._warn("did not receive everything in time")
        self._process.wait()
        self.tick()

    def _warn(self, problem: str) -> None:
        command = f"python -m pipeline.tracking {self.name} {self._run.path}"
        sync = "`wandb sync` of its folder in runs/wandb, then " if self.name == "wandb" else ""
        self._report(f"warning: {self.name}: {problem} ({self._log}); to send the rest: {sync}`{command}`")


@contextlib.contextmanager
def track_run(root: Path, run: Run, report: Report) -> Iterator[Tracking]:
    """Send the run of this block to its trackers."""
    tracking = Tracking(root, run, report)
    seconds = _FAILED_TIMEOUT_SECONDS
    try:
        yield tracking
        seconds = END_TIMEOUT_SECONDS
    finally:
        tracking.end(seconds)
