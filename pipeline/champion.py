"""Which bundle candidates have to beat: promoted when it serves, or by hand; the one before stays known."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.spec.errors import ConfigError
from pipeline.spec.registry import CHAMPION, PREVIOUS, Entry, Registry, Wanted, change_registry
from pipeline.spec.run import Run

if TYPE_CHECKING:  # the command line loads without numpy
    from pipeline.spec.bundle import Bundle


def promote(run: Run, bundle: Bundle, reason: str = "", name: str = CHAMPION, word: str | None = None) -> Entry:
    """What serves is what the next candidate has to beat. `word` names the registry, if not the run's own."""
    from pipeline.spec.champion import publish

    word = run.config.registry if word is None else word
    if name == PREVIOUS:
        raise ConfigError(f"{PREVIOUS} follows from the history of {CHAMPION}; give the bundle another name")
    if not name.strip():
        raise ConfigError("--name is empty; it stays in the history for ever")
    entry = Entry(
        bundle=bundle.digest,
        checkpoint=bundle.manifest.ancestors.checkpoint,
        path=run.bundle_path.relative_to(run.runs).as_posix(),
    )

    def decide(registry: Registry) -> Wanted | None:
        current = registry.names.get(name)
        if current is not None and current.bundle == entry.bundle:  # the same bundle in a later run changes nothing
            return None
        return Wanted(name, entry, reason or f"deployed by run {run.id}")

    publish(bundle, run.runs, word)
    return change_registry(run.runs, word, decide).names[name]


def rollback(runs: Path, word: str, name: str = CHAMPION, reason: str = "rolled back") -> Entry:
    """What a name meant before it means again, and the other way round."""

    def decide(registry: Registry) -> Wanted:
        entry = registry.before(name)
        if entry is None:
            raise ConfigError(f"{runs}: there is no previous {name} to go back to")
        return Wanted(name, entry, reason)

    return change_registry(runs, word, decide).names[name]
