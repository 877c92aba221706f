"""The champion whose training data new data is held against, and what that data looked like."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.contract.errors import PipelineError
from pipeline.contract.registry import CHAMPION, Entry, Registry
from pipeline.contract.run import Run, RunFile

if TYPE_CHECKING:
    from pipeline.data_checks.profile import Profile

PART = "rival:champion"  # of prepare's key: the bundle it is compared with, or NONE
NONE = "none that is trained on other data"
_LOOKED_AT = 32  # champions of the past


def rival(registry: Registry, runs: Path, parts: Mapping[str, str]) -> Entry | None:
    """The newest champion that was trained on other data than prepare makes of these parts.

    As a candidate is not judged by itself, data is not held against itself: a run that is deployed and run again finds
    the rival it had, so that its key stays what it was. Champions whose run is gone have nothing to compare.
    """
    own = _without(parts)
    for entry in _champions(registry):
        body = _run_of(entry, runs)
        record = body.steps.get("prepare") if body else None
        if body is not None and (record is None or _without(record.parts) != own):
            return entry
    return None


def entry_of(registry: Registry, runs: Path, run: Run) -> Entry | None:
    """The one that the run's key names; without a key, as when prepare is called by itself, the rival as it stands."""
    record = run.read().steps.get("prepare")
    if record is None or PART not in record.parts:
        return rival(registry, runs, record.parts if record else {})
    return next((entry for entry in _champions(registry) if entry.bundle == record.parts[PART]), None)


def profile_of(entry: Entry, runs: Path) -> Profile | None:
    from pipeline.data_checks.profile import read_profile

    return read_profile(_directory(entry, runs) / "prepare" / "profile.json")


def gone(registry: Registry, runs: Path) -> str:
    """A sentence where the champion's run cannot be found, else nothing."""
    entry = registry.names.get(CHAMPION)
    if entry is None or _run_of(entry, runs) is not None:
        return ""
    return (
        f"the champion's run {entry.run} is not here, so the data was not compared with what the champion "
        "was trained on; bring the run back, or name another champion with `pipe promote`"
    )


def _champions(registry: Registry) -> Iterator[Entry]:
    """The one of now, then those before it, each once."""
    past = (change.entry for change in reversed(registry.history) if change.name == CHAMPION)
    yield from list({entry.path: entry for entry in past}.values())[:_LOOKED_AT]


def _run_of(entry: Entry, runs: Path) -> RunFile | None:
    directory = _directory(entry, runs)
    if not (directory / "run.json").is_file():
        return None
    try:
        return Run(directory).read()
    except PipelineError:  # damaged: whoever needs the run itself will say so
        return None


def _directory(entry: Entry, runs: Path) -> Path:
    return runs / entry.run


def _without(parts: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in parts.items() if name != PART}
