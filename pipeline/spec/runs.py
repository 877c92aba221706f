"""The runs of a project, newest first; any layer may look for one."""

from __future__ import annotations

import itertools
import re
from datetime import datetime
from pathlib import Path

from pipeline.spec.run import Run

_SECOND = len("20260131-235959")  # at the beginning of a run's name
_TIMED = re.compile(r"\d{8}-\d{6}-")


def all_runs(runs: Path) -> list[Run]:
    """Newest first. Directory names start with the second they were made in; what is of one second is asked."""
    if not runs.is_dir():
        return []
    found = [Run(path) for path in runs.iterdir() if (path / "run.json").is_file()]
    found.sort(key=lambda run: (_second(run), run.id), reverse=True)
    seconds = [list(same) for _, same in itertools.groupby(found, _second)]
    return [run for same in seconds for run in (sorted(same, key=created, reverse=True) if len(same) > 1 else same)]


def _second(run: Run) -> str:
    """Its name begins with it; a run that a workflow has named tells it itself."""
    return run.id[:_SECOND] if _TIMED.match(run.id) else f"{created(run):%Y%m%d-%H%M%S}"


def created(run: Run) -> datetime:
    """To the microsecond; a run of an older version knows the second."""
    return datetime.fromisoformat(run.read().created)
