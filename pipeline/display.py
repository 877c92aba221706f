"""What a person sees while the road runs: live bars on a terminal, plain timestamped lines elsewhere.

How fast training comes along, and how long it will still take.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.contract.errors import ConfigError, PipelineError, StageError
from pipeline.contract.run import Run

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


_TAIL_BYTES = 4096
_TAIL_LINES = 12
# How the lines of launchers begin: torch's agent, mpirun, srun, horovodrun; and what torch says of a lost connection.
_LAUNCHER = re.compile(
    r"(\[rank\d+\]:)?\[?[EWIF]\d{4} \d\d:|\*{20}|Setting OMP_NUM|-{60}|srun: |slurmstepd: |Process \d+ exit with"
    r"|agent: |Exception raised from|frame #\d+: |<omitting python frames>"
)
_PROFILER = re.compile(r"(USDT|STAGE):\d{4}-")  # and those of its profiler, which a timeline needs
_MARK = re.compile(r"^\[\d+\]<std(out|err)>:", re.MULTILINE)  # what horovodrun puts before each line of a process
_AGAIN = re.compile(r"starting again from the (beginning|checkpoint of step \d+)")  # how a node tells of it
_ECHO = re.compile("echo: ")  # how a process begins that lost contact with the one that failed


class Display:
    """Everything goes to standard error: standard output is for data."""

    def __init__(self, live: bool) -> None:
        self._progress = _bars() if live else None
        self._bar: TaskID | None = None
        self._run: Run | None = None
        self._step = ""
        self._began = self._read = 0  # places in the step's log
        self._noisy = False
        self._pace = Pace()

    def say(self, text: str) -> None:
        if self._progress is not None:
            self._progress.console.print(text, markup=False)
        else:
            print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)

    def ask(self, question: str) -> bool:
        """Yes where there is nobody to ask, or no answer."""
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            return True
        if self._progress is not None:
            self._progress.stop()  # it would draw over the question
        print(question, end="", file=sys.stderr, flush=True)
        return not sys.stdin.readline().strip().lower().startswith("n")

    def start(self, run: Run, step: str, reason: str) -> None:
        self._run, self._step = run, step
        log = run.log(step)
        self._began = self._read = log.stat().st_size if log.exists() else 0
        self._noisy = False
        self._pace = Pace()
        self.say(f"{step}: {reason}")
        if self._progress is not None:
            self._progress.start()
            self._bar = self._progress.add_task(step, total=None, facts="")

    def tick(self) -> None:
        """Show what the step wrote since the last look."""
        assert self._run is not None
        for line in self._new_lines(self._run.log(self._step)):
            self._noisy = (self._noisy or is_end(line)) and not _AGAIN.search(line)
            if not self._noisy and not _LAUNCHER.match(line) and not _PROFILER.match(line):
                self.say(f"{self._step} | {line}")
        if self._step == "train":
            self._move_bar()

    def end(self, text: str) -> None:
        self.tick()
        if self._progress is not None and self._bar is not None:
            self._progress.remove_task(self._bar)
            self._progress.stop()
            self._bar = None
        self.say(f"{self._step}: {text}")

    def failed(self, error: PipelineError) -> None:
        """Where to look and how to go on; the error itself is printed once, by the command."""
        assert self._run is not None
        log = self._run.log(self._step)
        if error.exit_code == StageError.exit_code and log.exists():
            with log.open("rb") as file:
                file.seek(self._began)
                text = _MARK.sub("", file.read().decode(errors="replace"))
            for line in tail(text.splitlines()):
                print(f"    {line}", file=sys.stderr)
        print(f"log: {log}", file=sys.stderr)
        if error.complete:
            return
        if isinstance(error, ConfigError):  # a resumed run keeps its own settings
            print("to go on after mending it: pipe run all (what is finished is reused)", file=sys.stderr)
        else:
            print(f"to go on after mending it: pipe run --resume {self._run.id}", file=sys.stderr)

    def _move_bar(self) -> None:
        if self._progress is None or self._bar is None or self._run is None:
            return
        values = last_metrics(self._run.partial("train") / "metrics.jsonl")
        if values is None:
            return
        step, total = values["step"], values.get("total_steps")
        self._pace.saw(step, time.monotonic())
        left = self._pace.seconds_left(total) if total else None
        self._progress.update(self._bar, total=total, completed=step, facts=describe(values, left))

    def _new_lines(self, log: Path) -> list[str]:
        if not log.exists():
            return []
        with log.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]  # a half line is read again when it is whole
        self._read += len(whole)
        return [line for line in _MARK.sub("", whole.decode(errors="replace")).splitlines() if line.strip()]


def is_end(line: str) -> bool:
    """From here on the log is for debugging: a traceback, or the error that the command tells itself."""
    return bool(re.match(r"Traceback \(most recent|\[rank\d+\]: |error: |echo: ", line))


def tail(lines: Sequence[str]) -> list[str]:
    """The last lines of the step itself, without what its launcher, and those who only lost contact, say of its end."""
    own = list(itertools.takewhile(lambda line: not _LAUNCHER.match(line), lines))
    skipped = (_PROFILER, _ECHO)
    return [line for line in own or lines if line.strip() and not any(kind.match(line) for kind in skipped)][
        -_TAIL_LINES:
    ]


def last_metrics(path: Path) -> Mapping[str, Any] | None:
    """The newest training line of a journal that is still being written."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = file.read().splitlines()
    for line in reversed(lines):
        try:
            values: dict[str, Any] = json.loads(line)
        except ValueError:
            continue  # cut by the seek, or still being written
        if "loss" in values:
            return values
    return None


def describe(values: Mapping[str, Any], seconds_left: float | None) -> str:
    of = f"/{values['total_steps']}" if "total_steps" in values else ""
    parts = [f"epoch {values['epoch'] + 1}", f"step {values['step']}{of}", f"loss {values['loss']:.4f}"]
    if "samples_per_second" in values:
        parts.append(f"{values['samples_per_second']:,.0f} samples/s")
    if seconds_left is not None:
        parts.append(f"{clock(seconds_left)} left")
    return ", ".join(parts)


def _bars() -> Progress:
    from rich.console import Console  # only a terminal pays for loading it
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    return Progress(
        SpinnerColumn(),
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("{task.fields[facts]}"),
        console=Console(stderr=True, highlight=False, soft_wrap=True),
        transient=True,
    )


_WINDOW_SECONDS = 120.0  # long enough to hold validations and checkpoints, short enough to notice a change


class Pace:
    """Looks at steps as they are done, whatever they were spent on."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def saw(self, step: int, now: float) -> None:
        if self._seen and step <= self._seen[-1][1]:
            return
        self._seen.append((now, step))
        while self._seen[-1][0] - self._seen[0][0] > _WINDOW_SECONDS and len(self._seen) > 2:
            self._seen.popleft()

    def seconds_left(self, total: int) -> float | None:
        """Nothing until two different steps were seen."""
        if len(self._seen) < 2:
            return None
        (began, first), (ended, last) = self._seen[0], self._seen[-1]
        return (total - last) * (ended - began) / (last - first)


def clock(seconds: float) -> str:
    """As 0:07, 12:34 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
