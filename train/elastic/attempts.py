"""What the first training process tells of its attempt: from where it goes on, its first step, its first checkpoint."""

from __future__ import annotations

import socket

from pipeline.contract.attempts import read_events, tell
from pipeline.contract.errors import clear_passing
from pipeline.contract.run import Run
from train.process_group import Group


class Attempt:
    """Its number is the same on every process, and in no other attempt of the run."""

    def __init__(self, run: Run, number: int, tells: bool) -> None:
        self.number = number
        self._run = run
        self._stepped = self._kept = not tells

    def stepped(self, step: int) -> None:
        """Global step `step` is done."""
        if not self._stepped:
            self._stepped = True
            tell(self._run.path, event="step", attempt=self.number, step=step)

    def kept(self, step: int) -> None:
        """A checkpoint of it is made, so that another attempt would not begin where this one did."""
        if not self._kept:
            self._kept = True
            tell(self._run.path, event="checkpoint", attempt=self.number, step=step)


def begin(run: Run, group: Group, step: int) -> Attempt:
    """All are there, and go on from the checkpoint of `step`."""
    hosts = group.gather(socket.gethostname())
    number = 0
    if group.rank.first:
        number = 1 + max((event.attempt for event in read_events(run.path)), default=0)
        clear_passing(run.partial("train"))
    number = group.share(number)
    if group.rank.first:
        tell(run.path, event="start", attempt=number, processes=group.size, hosts=hosts, step=step)
    return Attempt(run, number, group.rank.first)
