"""Send one run to one tracker: `python -m pipeline.tracking mlflow runs/RUN`.

With `--follow`, `pipe` runs it beside the steps: it sends what is new every few seconds, until its standard input ends.
All it sends is in the run directory, and it records there what the tracker has. So a tracker that fails is tried again
and misses nothing, and a later command continues the same run of the tracker.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

from pipeline.contract.results import NewLines, read_facts
from pipeline.contract.run import Run
from pipeline.report.page import write_report
from pipeline.system.errors import PipelineError, missing_extra
from pipeline.system.files import read_object, write_json
from pipeline.tracking.contents import (
    bundle_files,
    read_ending,
    read_params,
    read_points,
    read_results,
    read_tags,
    result_files,
    training_key,
)
from pipeline.tracking.process import END_TIMEOUT_SECONDS, MARK, state_file
from pipeline.tracking.trackers import TRACKERS, Tracker

_POLL_SECONDS = 2.0
_RETRY_SECONDS = 60.0
_MAX_PROBLEM = 500  # characters
_NICE = 5  # training comes first

Value = TypeVar("Value")


@dataclass
class Sent:
    """What the tracker has of this run."""

    run: str = ""  # its own id of the run
    training: str = ""  # key of the training whose curves it has
    steps: dict[str, int] = field(default_factory=dict)  # last step by kind of line
    results: dict[str, float] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)


class Sender:
    """Sends what the tracker does not have yet."""

    def __init__(self, name: str, tracker: Tracker, run: Run, root: Path) -> None:
        self._name, self._tracker, self._run, self._root = name, tracker, run, root
        self._path = state_file(run, name)
        remedy = "delete it, and everything is sent again"
        self._sent = Sent(**read_object(self._path, remedy=remedy)) if self._path.exists() else Sent()
        self._lines = NewLines()
        self._is_open = False
        self._seen = ""  # content of run.json that results and tags were read with

    def send(self) -> None:
        """Send params, curves, results and tags; raise what the client raises."""
        body = self._run.read()
        self._begin_again_if_replaced(training_key(body))
        if not self._is_open:
            self._open()
        steps = dict(self._sent.steps)
        if training_key(body) and (points := read_points(self._lines, self._run, steps)):
            try:
                self._tracker.log(points)
            except BaseException:
                self._lines = NewLines()  # read them again
                raise
            self._sent.steps = steps
            self._record()
        if (seen := body.model_dump_json()) != self._seen:  # a step began or ended
            self._send_results()
            self._seen = seen

    def finish(self) -> None:
        """Send the rest and the files, and end the run of the tracker."""
        self.send()
        self._send_results()
        with tempfile.TemporaryDirectory(prefix="pipe-tracking-") as folder:
            page = Path(folder) / "report.html"
            write_report(self._run, page)
            self._tracker.upload({**result_files(self._run), page.name: page}, bundle_files(self._run))
            self._tracker.close(read_ending(self._run.read()))

    def _open(self) -> None:
        run = self._tracker.open(self._sent.run)
        if run != self._sent.run:
            self._forget(run)
        self._record()
        self._tracker.set_params(read_params(self._run))
        self._is_open = True
        report(f"{self._name}: {self._tracker.describe()}")

    def _begin_again_if_replaced(self, training: str) -> None:
        """Begin another run of the tracker where training began again: the curves of the old one are not its own."""
        if training and self._sent.training and training != self._sent.training:
            if not self._is_open:
                self._tracker.open(self._sent.run)
            self._tracker.tag({"replaced": "training began again in another run of the tracker"})
            self._tracker.close("killed")
            self._forget("")
            self._is_open = False
        self._sent.training = training or self._sent.training

    def _forget(self, run: str) -> None:
        """Send everything to this run of the tracker; empty: to a new one."""
        self._sent, self._lines, self._seen = Sent(run, self._sent.training), NewLines(), ""

    def _send_results(self) -> None:
        facts = read_facts(self._run)
        results, tags = read_results(facts), read_tags(self._run, self._root, facts)
        if new := _difference(results, self._sent.results):
            self._tracker.summarize(new, max(self._sent.steps.values(), default=0))
            self._sent.results = results
        if changed := _difference(tags, self._sent.tags):
            self._tracker.tag(changed)
            self._sent.tags = tags
        self._record()

    def _record(self) -> None:
        self._path.parent.mkdir(exist_ok=True)
        write_json(self._path, asdict(self._sent))


def _difference(values: Mapping[str, Value], sent: Mapping[str, Value]) -> dict[str, Value]:
    return {name: value for name, value in values.items() if sent.get(name) != value}


def follow(sender: Sender, name: str, wait: Callable[[float], bool]) -> int:
    """Send until `wait` returns that the run has ended; return 1 if the tracker did not get everything."""
    seconds, retry_at, is_failing = 0.0, 0.0, False
    while True:
        ended = wait(seconds)
        seconds = _POLL_SECONDS
        if not ended and time.monotonic() < retry_at:
            continue
        try:
            (sender.finish if ended else sender.send)()
        except Exception as error:  # whatever a client raises must not end this process
            if not is_failing:
                report(f"warning: {name}: {_describe(error)}; the run goes on, and sends it again later")
            traceback.print_exc()
            is_failing, retry_at = True, time.monotonic() + _RETRY_SECONDS
        else:
            if is_failing:
                report(f"{name}: has received everything again")
            is_failing = False
        if ended:
            return int(is_failing)


def _describe(error: Exception) -> str:
    text = str(missing_extra(error) or f"{type(error).__name__}: {error}")
    return " ".join(text.split())[:_MAX_PROBLEM].rstrip(".")


def report(text: str) -> None:
    """Print a line that `pipe` passes on; it finds it by the mark."""
    print(f"{MARK}{text}", flush=True)


def _wait_for_end(seconds: float) -> bool:
    """Return whether standard input ended within the time; from then on the time is limited."""
    if not select.select([0], [], [], seconds)[0]:
        return False
    while os.read(0, 4096):
        pass
    signal.alarm(END_TIMEOUT_SECONDS)  # a client may hang
    return True


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="pipeline.tracking", description="send one run to one tracker")
    parser.add_argument("tracker", choices=sorted(TRACKERS))
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--root", type=Path, default=Path(), help="project folder (default: here)")
    parser.add_argument("--follow", action="store_true", help="go on until standard input ends")
    options = parser.parse_args(argv)
    run = Run(options.run.resolve())
    os.nice(_NICE)
    try:
        sender = Sender(options.tracker, TRACKERS[options.tracker](run), run, options.root.resolve())
    except PipelineError as error:
        report(f"warning: {options.tracker}: {error}")
        return 1
    status = follow(sender, options.tracker, _wait_for_end if options.follow else lambda _: True)
    if status:
        command = f"python -m pipeline.tracking {options.tracker} {options.run}"
        report(f"warning: {options.tracker}: does not have all of this run; `{command}` sends the rest")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
