"""The champion whose training data new data is compared with, and the profile of that data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.contract.registry import CHAMPION, Entry, Registry, champion_name
from pipeline.contract.run import Run, RunFile
from pipeline.system.errors import BundleError, PipelineError
from pipeline.system.files import digest_file

if TYPE_CHECKING:
    from pipeline.data_checks.profile import Profile

CHAMPION_PART = "reference:champion"  # part of the key of prepare: the champion's bundle, or NO_CHAMPION
NO_CHAMPION = "none that is trained on other data"
_MAX_PAST_CHAMPIONS = 32  # champions of the past that are considered


def comparable_champion(registry: Registry, runs: Path, parts: Mapping[str, str], name: str = CHAMPION) -> Entry | None:
    """Return the newest champion that was trained on other data than prepare produces from these parts.

    Data is not compared with itself: after a deployment a rerun finds the champion it had before, so that its key does
    not change. Champions whose run was deleted are skipped.
    """
    own_parts = _without_champion(parts)
    for entry in _past_champions(registry, name):
        body = _read_run(entry, runs)
        record = body.steps.get("prepare") if body else None
        if body is not None and (record is None or _without_champion(record.parts) != own_parts):
            return entry
    return None


def recorded_champion(registry: Registry, runs: Path, run: Run) -> Entry | None:
    """Return the champion in the run's key; without a key (prepare called directly) the current one."""
    record = run.read().steps.get("prepare")
    if record is None or CHAMPION_PART not in record.parts:
        return comparable_champion(registry, runs, record.parts if record else {}, champion_name(run.config))
    return registry.find_entry(record.parts[CHAMPION_PART])


def champion_profile(entry: Entry, runs: Path) -> Profile | None:
    from pipeline.data_checks.profile import read_profile

    path, body = runs / entry.run / "prepare" / "profile.json", _read_run(entry, runs)
    record = body.steps.get("prepare") if body else None
    recorded = record.outputs.get(path.name) if record else None
    if recorded is not None and path.is_file() and (actual := digest_file(path)) != recorded:
        raise BundleError(
            f"{path}: changed since it was recorded (recorded {recorded[:12]}, found {actual[:12]}); restore it, or "
            "choose another champion with `pipe registry promote`"
        )
    return read_profile(path)


def missing_champion_note(registry: Registry, runs: Path, name: str = CHAMPION) -> str:
    """Return a note if the champion's run does not exist here, else an empty string."""
    entry = registry.names.get(name)
    if entry is None or _read_run(entry, runs) is not None:
        return ""
    return (
        f"the champion's run {entry.run} is not here, so the data was not compared with the champion's training "
        "data; to fix it: restore the run, or choose another champion with `pipe registry promote`"
    )


def _past_champions(registry: Registry, name: str) -> Iterator[Entry]:
    """Yield the current champion, then earlier ones, each once."""
    past = (change.entry for change in reversed(registry.history) if change.name == name)
    yield from list({entry.path: entry for entry in past}.values())[:_MAX_PAST_CHAMPIONS]


def _read_run(entry: Entry, runs: Path) -> RunFile | None:
    if not (runs / entry.run / "run.json").is_file():
        return None
    try:
        return Run(runs / entry.run).read()
    except PipelineError:  # damaged; commands that need the run report it
        return None


def _without_champion(parts: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in parts.items() if name != CHAMPION_PART}
