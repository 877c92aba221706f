"""Report the current attempt: the first training process records its start, first step and first checkpoint."""

from __future__ import annotations

import socket
import sys

from pipeline.contract.restarts import newest_attempt, read_events, record_event
from pipeline.contract.run import Run
from pipeline.system.errors import clear_passing
from train.ledger import LEDGER_FILE, last_attempt
from train.process_group import ProcessGroup


class AttemptReporter:
    """The current attempt; its number is the same on every process and unique in the run."""

    def __init__(self, run: Run, number: int, reports: bool) -> None:
        self.number = number
        self._run = run
        self._has_step = self._has_checkpoint = not reports

    def step_done(self, step: int) -> None:
        if not self._has_step:
            self._has_step = True
            record_event(self._run.path, event="step", attempt=self.number, step=step)

    def checkpoint_written(self, step: int) -> None:
        """Record the first checkpoint: another attempt would start from it, not from where this one did."""
        if not self._has_checkpoint:
            self._has_checkpoint = True
            record_event(self._run.path, event="checkpoint", attempt=self.number, step=step)


def begin_attempt(run: Run, group: ProcessGroup, step: int) -> AttemptReporter:
    """Number and record an attempt that continues from the checkpoint of `step`; all processes take part."""
    hosts = group.gather(socket.gethostname())
    number = 0
    if group.rank.first:
        recorded, trained = newest_attempt(read_events(run.path)), last_attempt(run.partial("train") / LEDGER_FILE)
        if recorded < trained:
            print(f"warning: logs/attempts is damaged: it lacks attempt {trained} of the ledger", file=sys.stderr)
        number = 1 + max(recorded, trained)
        clear_passing(run.partial("train"))
    number = group.share(number)
    if group.rank.first:
        record_event(run.path, event="start", attempt=number, processes=group.size, hosts=hosts, step=step)
    return AttemptReporter(run, number, group.rank.first)
