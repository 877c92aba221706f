"""`runs/registry.json`: names such as `champion` → bundle digests, with the history of every change."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from pipeline.spec.errors import PipelineError
from pipeline.spec.files import write_atomic
from pipeline.spec.frozen import Frozen

CHAMPION = "champion"
PREVIOUS = "previous"


class Entry(Frozen):
    bundle: str  # bundle digest
    checkpoint: str  # digest of model.safetensors, to tell a model from itself
    path: str  # bundle directory, relative to the runs directory


class Change(Frozen):
    at: str
    name: str
    entry: Entry
    reason: str


class Registry(Frozen):
    names: Mapping[str, Entry] = {}
    history: tuple[Change, ...] = ()

    def champion_for(self, checkpoint: str | None) -> Entry | None:
        """Who a candidate must beat: the newest champion, in order of history, that is not the candidate itself."""
        if CHAMPION not in self.names:
            return None
        if self.names[CHAMPION].checkpoint != checkpoint:
            return self.names[CHAMPION]
        past = (change.entry for change in reversed(self.history) if change.name == CHAMPION)
        return next((entry for entry in past if entry.checkpoint != checkpoint), None)

    def assign(self, name: str, entry: Entry, reason: str) -> Registry:
        """The registry after `name` was given to `entry`; the one it replaces becomes `previous`."""
        if self.names.get(name) == entry:
            return self
        names = dict(self.names)
        if name == CHAMPION and name in names:
            names[PREVIOUS] = names[name]
        names[name] = entry
        change = Change(at=datetime.now(UTC).isoformat(timespec="seconds"), name=name, entry=entry, reason=reason)
        return Registry(names=names, history=(*self.history, change))


def read_registry(runs: Path) -> Registry:
    path = runs / "registry.json"
    if not path.exists():
        return Registry()
    try:
        return Registry.model_validate_json(path.read_text())
    except ValidationError as error:
        raise PipelineError(f"{path}: damaged ({error.errors()[0]['msg']}); restore it or move it away") from error


def write_registry(runs: Path, registry: Registry) -> None:
    write_atomic(runs / "registry.json", registry.model_dump_json(indent=2) + "\n")
