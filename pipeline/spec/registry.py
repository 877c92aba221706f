"""The model registry: a history of changes that only grows; names such as `champion` are a fold over it."""

from __future__ import annotations

import getpass
import re
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from pipeline.spec.digest import digest_bytes
from pipeline.spec.errors import PipelineError
from pipeline.spec.frozen import Frozen
from pipeline.spec.shelf import Shelf, shelf_of

CHAMPION = "champion"
PREVIOUS = "previous"  # follows from the history; nobody gives it

_CHANGE = re.compile(r"\d{6,}\.json")


class Entry(Frozen):
    bundle: str  # bundle digest
    checkpoint: str  # digest of model.safetensors, to tell a model from itself
    path: str  # bundle directory, relative to the runs directory it was promoted from

    @property
    def run(self) -> str:
        return self.path.partition("/")[0]


class Change(Frozen):
    """One file of the history, `000001.json` and so on."""

    at: str
    name: str
    entry: Entry
    reason: str
    by: str = ""
    before: str = ""  # SHA-256 of the change before, so that none can be altered or taken out unseen
    token: str = ""  # tells what two write in the same second


class _Old(Frozen):
    """`runs/registry.json` of earlier versions; its history goes on in the folder beside it."""

    names: Mapping[str, Entry] = {}
    history: tuple[Change, ...] = ()


@dataclass(frozen=True)
class Registry:
    history: tuple[Change, ...] = ()  # oldest first

    @property
    def names(self) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        for change in self.history:
            current = found.get(change.name)
            if change.name == CHAMPION and current is not None and current.bundle != change.entry.bundle:
                found[PREVIOUS] = current
            found[change.name] = change.entry
        return found

    def champion_for(self, checkpoint: str | None) -> Entry | None:
        """Who a candidate must beat: the newest champion, in order of history, that is not the candidate itself."""
        past = (change.entry for change in reversed(self.history) if change.name == CHAMPION)
        return next((entry for entry in past if entry.checkpoint != checkpoint), None)

    def before(self, name: str) -> Entry | None:
        """What a name meant before what it means now."""
        past = [change.entry for change in reversed(self.history) if change.name == name]
        return next((entry for entry in past if entry.bundle != past[0].bundle), None)

    def promoted(self, entry: Entry) -> Change:
        """How a champion became one, at last."""
        return next(change for change in reversed(self.history) if (change.name, change.entry) == (CHAMPION, entry))

    def last(self, name: str) -> Change | None:
        return next((change for change in reversed(self.history) if change.name == name), None)


@dataclass(frozen=True)
class Wanted:
    """A change that somebody decided on, having read the history."""

    name: str
    entry: Entry
    reason: str


def read_registry(runs: Path, word: str) -> Registry:
    """`word` is `registry` of the configuration."""
    return Registry(_history(_Place.of(runs, word))[0])


def change_registry(runs: Path, word: str, decide: Callable[[Registry], Wanted | None]) -> Registry:
    """Let `decide` add a change to the history it is shown; None adds none.

    The change gets the number after the last one it saw. Where another writer was faster that number is taken, and
    `decide` is asked again with the longer history: no change is lost, and none rests on a state that was over.
    """
    place, seen = _Place.of(runs, word), -1
    while True:
        history, digest = _history(place)
        if len(history) <= seen:
            raise PipelineError(f"{place.shelf.where}: a change that is there is not listed; try again later")
        seen = len(history)
        wanted = decide(Registry(history))
        if wanted is None:
            return Registry(history)
        change = _made(wanted, digest)
        name = f"{seen - len(place.old.history) + 1:06d}.json"
        if place.shelf.create(name, (change.model_dump_json(indent=2) + "\n").encode()):
            return Registry((*history, change))


@dataclass(frozen=True)
class _Place:
    shelf: Shelf
    old: _Old
    root: str  # what the first change names as the one before it

    @classmethod
    def of(cls, runs: Path, word: str) -> _Place:
        path = runs / "registry.json"
        if word or not path.exists():
            return cls(shelf_of(word, runs), _Old(), "")
        raw = path.read_bytes()
        try:
            old = _Old.model_validate_json(raw)
        except ValidationError as error:
            raise PipelineError(f"{path}: damaged ({error.errors()[0]['msg']}); restore it or move it away") from error
        if old.names != Registry(old.history).names:
            raise PipelineError(f"{path}: damaged (its names do not follow from its history); restore it or move it away")  # fmt: skip  # noqa: E501
        return cls(shelf_of(word, runs), old, digest_bytes(raw))


def _history(place: _Place) -> tuple[tuple[Change, ...], str]:
    """All changes, each held against the one before it; and the digest of the last one."""
    shelf, found, digest = place.shelf, [*place.old.history], place.root
    names = sorted((name for name in shelf.names() if _CHANGE.fullmatch(name)), key=lambda name: int(name[:-5]))
    for number, name in enumerate(names, start=1):
        if int(name[:-5]) != number:
            raise PipelineError(f"{shelf.where}: change {number:06d}.json is missing; restore it from a copy")
    for name, raw in zip(names, shelf.read(names), strict=True):
        try:
            change = Change.model_validate_json(raw)
        except ValidationError as error:
            raise PipelineError(
                f"{shelf.where}/{name}: damaged ({error.errors()[0]['msg']}); restore it from a copy"
            ) from error
        if change.before != digest:
            raise PipelineError(
                f"{shelf.where}/{name}: does not follow from the change before it, so one of the two was altered; "
                "restore them from a copy"
            )
        found.append(change)
        digest = digest_bytes(raw)
    return tuple(found), digest


def _made(wanted: Wanted, digest: str) -> Change:
    return Change(
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        name=wanted.name,
        entry=wanted.entry,
        reason=wanted.reason,
        by=_who(),
        before=digest,
        token=secrets.token_hex(8),
    )


def _who() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = "somebody"
    return f"{user}@{socket.gethostname()}"
