"""Which bundle candidates have to beat: promoted when it serves, or by hand; the one before stays known."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.spec.errors import ConfigError
from pipeline.spec.registry import CHAMPION, PREVIOUS, Entry, read_registry, write_registry
from pipeline.spec.run import Run

if TYPE_CHECKING:  # the command line loads without numpy
    from pipeline.spec.bundle import Bundle


def promote(run: Run, bundle: Bundle, reason: str = "deployed") -> Entry:
    """What serves is what the next candidate has to beat."""
    entry = Entry(
        bundle=bundle.digest,
        checkpoint=bundle.manifest.ancestors.checkpoint,
        path=run.bundle_path.relative_to(run.runs).as_posix(),
    )
    registry = read_registry(run.runs)
    current = registry.names.get(CHAMPION)
    if current is not None and current.bundle == entry.bundle:  # the same bundle in a later run changes nothing
        return current
    write_registry(run.runs, registry.assign(CHAMPION, entry, f"{reason} by run {run.id}"))
    return entry


def rollback(runs: Path) -> Entry:
    """The champion before becomes champion again, and the other way round."""
    registry = read_registry(runs)
    if PREVIOUS not in registry.names:
        raise ConfigError(f"{runs}: there is no previous champion to go back to")
    entry = registry.names[PREVIOUS]
    write_registry(runs, registry.assign(CHAMPION, entry, "rolled back"))
    return entry
