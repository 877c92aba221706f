"""One line at the bottom of a terminal that shows the progress of a step; the other output is printed above it.

Below it there may be a panel, lines of which as many are drawn as there is room for.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TextIO

from pipeline.system.wording import clock

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
    """Draws the progress ten times a second from a thread of its own, until it is stopped."""

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
