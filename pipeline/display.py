"""Show the progress of a run on standard error: a progress bar on a terminal, lines with the time elsewhere."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from pipeline.contract.restarts import Event, read_events
from pipeline.contract.run import Run
from pipeline.system.errors import ConfigError, DataError, PipelineError, ResourceError, StageError
from pipeline.system.wording import clock

METRICS_FILE = "metrics.jsonl"
_TAIL_BYTES = 4096
_LINE_SECONDS = 60.0  # between lines with the progress of training, without a terminal
_ROWS_LINE_SECONDS = 5.0  # between lines with the progress of rows
_TAIL_LINES = 12
_RATE_WINDOW_SECONDS = 120.0  # long enough for validations and checkpoints, short enough to notice a change
# Beginnings of lines by launchers (agent, mpirun, srun, horovodrun), and by torch if it loses a connection or aborts.
# They stay in the log; the messages of `pipe` say what they mean.
_LAUNCHER = re.compile(
    r"(\[rank\d+\]:)?\[?[EWIF]\d{4} \d\d:|\*{20}|Setting OMP_NUM|-{60}|srun: |slurmstepd: |Process \d+ exit with"
    r"|agent: |Exception raised from|frame #\d+: |<omitting python frames>|terminate called |  what\(\): "
)
_PROFILER = re.compile(r"(USDT|STAGE):\d{4}-")  # lines by torch's profiler
_RANK_PREFIX = re.compile(r"^\[\d+\]<std(out|err)>:", re.MULTILINE)  # added to each line by horovodrun
_RESTART = re.compile(r"starting again from the (beginning|checkpoint of step \d+)")  # a node restarts training
_ECHO = re.compile("echo: ")  # a process lost contact with the one that failed


class Display:
    """Prints to standard error: standard output is for data."""

    def __init__(self, live: bool) -> None:
        self._line = StatusLine() if live and can_draw(sys.stderr) else None
        self._progress: StepProgress | None = None  # of the running step
        self._next_line = 0.0
        self.run: Run | None = None  # that the command works on
        self._step = self._activity = ""
        self._log_start = self._log_position = 0
        self._hidden = False  # the log goes on with a traceback
        self._outdated: Mapping[str, Any] | None = None  # the last metrics of an earlier attempt
        self._old_events = 0
        self._rate = StepRate()

    def report(self, text: str) -> None:
        if self._line is not None:
            self._line.print_above(text)
        else:
            print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)

    @property
    def panel(self) -> Callable[[Sequence[str]], None] | None:
        """What shows lines below the progress; None without a terminal."""
        return None if self._line is None else functools.partial(setattr, self._line, "panel")

    def ask(self, question: str, default: bool = True) -> bool:
        """Ask a question on the terminal; the answer is `default` without a terminal, or without an answer."""
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            return default
        progress = self._line.stop() if self._line is not None else None  # it would draw over the question
        print(question, end="", file=sys.stderr, flush=True)
        answer = sys.stdin.readline()
        if self._line is not None and progress is not None:
            self._line.start(progress)
        return {"y": True, "n": False}.get(answer.strip().lower()[:1], default)

    def start(self, run: Run, step: str, reason: str, activity: str = "") -> None:
        """Begin a step; `activity` is shown on a terminal until more is known."""
        self.run, self._step, self._activity = run, step, activity
        log = run.log(step)
        self._log_start = self._log_position = log.stat().st_size if log.exists() else 0
        self._hidden = False
        self._begin_attempt()
        self.report(f"{step}: {reason}")
        self._progress, self._next_line = StepProgress(step, (activity,)), time.monotonic() + _LINE_SECONDS
        if self._line is not None:
            self._line.start(self._progress)

    def tick(self) -> None:
        """Show what the step has written since the last call."""
        assert self.run is not None
        for line in self._new_lines(self.run.log(self._step)):
            restarts = _RESTART.search(line)
            if restarts:
                self._begin_attempt()
            self._hidden = (self._hidden or begins_error(line)) and not restarts
            if not self._hidden and not is_raw(line):
                self.report(f"{self._step} | {line}")
        if self._step == "train" and (self._line is not None or time.monotonic() >= self._next_line):
            self._next_line = time.monotonic() + _LINE_SECONDS
            self._update_progress()

    def end(self, text: str) -> None:
        try:
            self.tick()
        finally:
            self.clear()
        self.report(f"{self._step}: {text}")

    def clear(self) -> None:
        """Remove the progress from the terminal, however the step ends."""
        if self._line is not None:
            self._line.stop()

    def failed(self, error: PipelineError) -> None:
        """Print the end of the log and how to continue; the command itself prints the error, once."""
        assert self.run is not None
        log = self.run.log(self._step)
        if error.exit_code == StageError.exit_code and log.exists():
            with log.open("rb") as file:
                file.seek(self._log_start)
                text = _RANK_PREFIX.sub("", file.read().decode(errors="replace"))
            for line in step_tail(text.splitlines()):
                if not (line.startswith("error: ") and line.removeprefix("error: ") in str(error)):
                    print(f"    {line}", file=sys.stderr)
        print(f"log: {log}", file=sys.stderr)
        if error.keeps_output:
            return
        is_about_data = isinstance(error, DataError) and self._step == "prepare"  # a setting may accept such data
        is_early = is_about_data or (self._step == "check" and not isinstance(error, ResourceError))
        if isinstance(error, ConfigError) or is_early:  # a resumed run keeps its own settings
            print("to continue after fixing it: pipe run all (finished steps are reused)", file=sys.stderr)
        else:
            hint = " (if code changed: with --accept-changes)" if self._step == "train" else ""
            print(f"to continue after fixing it: pipe run --resume {self.run.id}{hint}", file=sys.stderr)

    def _begin_attempt(self) -> None:
        """Show no values of an earlier attempt as if they were new."""
        assert self.run is not None
        self._outdated = last_metrics(self.run.partial(self._step) / METRICS_FILE)
        self._old_events = len(read_events(self.run.path))
        self._rate = StepRate()

    def _update_progress(self) -> None:
        assert self.run is not None and self._progress is not None
        values = last_metrics(self.run.partial("train") / METRICS_FILE)
        if values is not None:
            self._progress.completed, self._progress.total = values["step"], values.get("total_steps", 0)
        shown = self._progress.facts
        if values is None or values == self._outdated:
            self._progress.facts = (describe_start(read_events(self.run.path)[self._old_events :], self._activity),)
        else:
            self._rate.add(values["step"], time.monotonic())
            seconds_left = self._rate.seconds_left(self._progress.total) if self._progress.total else None
            self._progress.facts = describe_metrics(values, seconds_left)
        if self._line is None and self._progress.facts != shown:
            self.report(f"train: {self._progress.facts[0]}")

    def _new_lines(self, log: Path) -> list[str]:
        if not log.exists():
            return []
        with log.open("rb") as file:
            file.seek(self._log_position)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]  # an incomplete line is read again later
        self._log_position += len(complete)
        return [line for line in _RANK_PREFIX.sub("", complete.decode(errors="replace")).splitlines() if line.strip()]


class RowProgress:
    """Progress of rows: a bar on a terminal, a line every few seconds elsewhere."""

    def __init__(self) -> None:
        self._line = StatusLine() if can_draw(sys.stderr) else None
        self._progress, self._next_line = StepProgress("predict"), time.monotonic() + _ROWS_LINE_SECONDS
        if self._line is not None:
            self._line.start(self._progress)

    def report(self, done: int, total: int | None) -> None:
        now = time.monotonic()
        speed = f"{done / max(1e-3, now - self._progress.started):,.0f} rows/s"
        text = f"{done:,}{f' of {total:,}' if total else ''} rows, {speed}"
        self._progress.completed, self._progress.total, self._progress.facts = done, total or 0, (text,)
        if self._line is None and now >= self._next_line:
            self._next_line = now + _ROWS_LINE_SECONDS
            print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._line is not None:
            self._line.stop()


def begins_error(line: str) -> bool:
    """True for the first line of a traceback, or of an error that the command prints itself."""
    return bool(re.match(r"Traceback \(most recent|\[rank\d+\]: |error: |echo: ", line))


def is_raw(line: str) -> bool:
    """Return whether a line is for the log only, as libraries wrote it."""
    return bool(_LAUNCHER.match(line) or _PROFILER.match(line))


def step_tail(lines: Sequence[str]) -> list[str]:
    """Return the last lines of the step itself, without those of its launcher and of processes that lost contact."""
    step_lines = list(itertools.takewhile(lambda line: not _LAUNCHER.match(line), lines))
    relevant = [line for line in step_lines or lines if line.strip() and not is_raw(line) and not _ECHO.match(line)]
    return (relevant or list(lines))[-_TAIL_LINES:]


def last_metrics(path: Path) -> Mapping[str, Any] | None:
    """Return the newest training values of a metrics file that is still being written."""
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


def describe_start(events: Sequence[Event], activity: str) -> str:
    """Return what an attempt of training does before its first metrics."""
    if not events or events[-1].event in ("launch", "end"):
        return activity
    processes = max(event.processes for event in events)
    return f"{count_processes(processes)}, computing the first steps"


def count_processes(count: int) -> str:
    return f"{count} process" if count == 1 else f"{count} processes"


def describe_metrics(values: Mapping[str, Any], seconds_left: float | None) -> tuple[str, ...]:
    """Return the facts of a metrics line, and shorter versions: the bar shows the step, too."""
    of = f"/{values['total_steps']}" if "total_steps" in values else ""
    facts = {"epoch": f"epoch {values['epoch'] + 1}", "step": f"step {values['step']}{of}"}
    facts["loss"] = f"loss {values['loss']:#.4g}"
    if "samples_per_second" in values:
        facts["speed"] = f"{values['samples_per_second']:,.0f} samples/s"
    if seconds_left is not None:
        facts["left"] = f"{clock(seconds_left)} left"
    left_out = ("", "speed", "epoch", "step", "loss")
    return tuple(
        ", ".join(fact for name, fact in facts.items() if name not in left_out[:count])
        for count in range(1, len(left_out) + 1)
    )


class StepRate:
    """Steps per second within a window, including validation and checkpoints."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque()

    def add(self, step: int, now: float) -> None:
        if self._steps and step <= self._steps[-1][1]:
            return
        self._steps.append((now, step))
        while self._steps[-1][0] - self._steps[0][0] > _RATE_WINDOW_SECONDS and len(self._steps) > 2:
            self._steps.popleft()

    def seconds_left(self, total: int) -> float | None:
        """Return None until two different steps were added."""
        if len(self._steps) < 2:
            return None
        (first_time, first_step), (last_time, last_step) = self._steps[0], self._steps[-1]
        return (total - last_step) * (last_time - first_time) / (last_step - first_step)


_REDRAW_SECONDS = 0.1
_DEFAULT_WIDTH, _DEFAULT_HEIGHT = 80, 24
_LONGEST_BAR, _SHORTEST_BAR = 24, 6

# The cursor stays at the beginning of the line, so that clearing works after the window has become narrower, too.
_CLEAR = "\r\x1b[J"
_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
_BOLD, _GREEN, _DIM, _PLAIN = "\x1b[1m", "\x1b[32m", "\x1b[2m", "\x1b[0m"


@dataclass
class StepProgress:
    """What is known of a running step."""

    name: str
    facts: Sequence[str] = ()  # versions of one text, the longest first; the first that fits is drawn
    completed: int = 0
    total: int = 0  # 0: unknown, no bar is drawn
    started: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Style:
    """Characters and colors that the terminal can show."""

    spinner: str = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
    done: str = "━"
    rest: str = "─"
    has_colors: bool = True

    def paint(self, text: str, color: str) -> str:
        return f"{color}{text}{_PLAIN}" if self.has_colors and text else text


def can_draw(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


class StatusLine:
    """One line at the bottom of a terminal that shows the progress of a step; the other output is printed above it.

    Below it there may be a panel, lines of which as many are drawn as there is room for. A thread of its own draws them
    ten times a second, until it is stopped.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._style = choose_style(self._stream)
        self._progress: StepProgress | None = None
        self.panel: Sequence[str] = ()
        self._turns = itertools.cycle(self._style.spinner)
        self._lock = threading.Lock()  # for all output
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, progress: StepProgress) -> None:
        self._progress = progress
        self._stopped.clear()
        self._thread = threading.Thread(target=self._redraw, name="status line", daemon=True)
        self._thread.start()

    def stop(self) -> StepProgress | None:
        """Remove the line and return what it showed; None where nothing was drawn."""
        if self._thread is None:
            return None
        self._stopped.set()
        self._thread.join()
        self._thread = None
        self._write(_CLEAR + _SHOW_CURSOR)
        return self._progress

    def print_above(self, text: str) -> None:
        is_drawn = self._thread is not None
        with self._lock:
            self._write((_CLEAR if is_drawn else "") + text + "\n" + (self._drawn() if is_drawn else ""))

    def _redraw(self) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone; its signal ends the command
            while not self._stopped.wait(_REDRAW_SECONDS):
                with self._lock:
                    self._write(self._drawn())

    def _drawn(self) -> str:
        assert self._progress is not None
        width, height = terminal_size(self._stream)
        line = format_line(self._progress, next(self._turns), width, self._style)
        panel = clip(self.panel, width, height - 2)
        below = "".join(f"\x1b[K\n{text}" for text in panel)
        back = f"\x1b[{len(panel)}A" if panel else ""
        return f"{_HIDE_CURSOR}\r{line}{below}\x1b[J{back}\r"

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def choose_style(stream: TextIO) -> Style:
    has_colors = not os.environ.get("NO_COLOR")
    if "utf" in (stream.encoding or "").lower():
        return Style(has_colors=has_colors)
    return Style(spinner="|/-\\", done="#", rest="-", has_colors=has_colors)


def terminal_size(stream: TextIO) -> tuple[int, int]:
    """Return columns and lines."""
    try:
        columns, lines = os.get_terminal_size(stream.fileno())
    except OSError:  # no terminal
        columns = lines = 0
    return columns or _DEFAULT_WIDTH, lines or _DEFAULT_HEIGHT


def clip(lines: Sequence[str], width: int, height: int) -> list[str]:
    """Return the lines, or as many as there is room for and the number of the others; the last column stays free."""
    shown = [line[: max(0, width - 1)] for line in lines]
    if len(shown) <= max(0, height):
        return shown
    return [*shown[: max(0, height - 1)], f"… {len(shown) - max(0, height - 1)} more lines"[: max(0, width - 1)]]


def format_line(progress: StepProgress, turn: str, width: int, style: Style) -> str:
    """Return one line that leaves the last column free: facts are left out first, then the bar becomes shorter."""
    elapsed = clock(time.monotonic() - progress.started)
    room = width - 1 - len(f"{turn} {progress.name} {elapsed}")
    if room < 0:
        return f"{turn} {elapsed}"[: max(0, width - 1)]
    shortest_bar = _SHORTEST_BAR + 1 if progress.total else 0
    facts = next((f"  {text}" for text in progress.facts if len(text) + 2 <= room - shortest_bar), "")
    bar = _format_bar(progress, min(_LONGEST_BAR, room - len(facts) - 1), style)
    return " ".join(filter(None, (turn, style.paint(progress.name, _BOLD), bar, elapsed))) + facts


def _format_bar(progress: StepProgress, width: int, style: Style) -> str:
    if not progress.total or width < 1:
        return ""
    done = int(width * min(1.0, progress.completed / progress.total))
    return style.paint(style.done * done, _GREEN) + style.paint(style.rest * (width - done), _DIM)
