"""The line between two laps: a racing process reports the last one and waits for its next start."""

from __future__ import annotations

import json
import sys
import time


class Finished(Exception):
    """The race is over."""


class Gate:
    """Called before each lap; standard input gives the start, standard output takes the times."""

    def __init__(self) -> None:
        self._started: tuple[float, float] | None = None

    def __call__(self) -> None:
        if self._started is not None:
            wall, cpu = self._started
            print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu]), flush=True)
        if not sys.stdin.readline():
            raise Finished
        self._started = time.perf_counter(), time.process_time()
