"""The model registry: a history of changes that only grows; names such as `champion` are a fold over it.

The bundle that the registry means: in its run, or in the registry's own copy of it.
"""

from __future__ import annotations

import getpass
import os
import re
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

from pydantic import ValidationError

from pipeline.contract.bundle import BESIDE, Bundle, Manifest, open_bundle
from pipeline.contract.errors import BundleError, PipelineError
from pipeline.contract.files import digest_bytes
from pipeline.contract.registry_store import Shelf, shelf_of
from pipeline.contract.settings.section import Frozen

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


_MEND = "restore it, or name another champion with `pipe promote`"
_FETCHED = ".champions"  # below the runs: bundles that came from a registry elsewhere
_MANIFEST = "manifest.json"


def champion_bundle(entry: Entry, runs: Path, word: str) -> Bundle:
    """Verified, and the very one that the registry means."""
    who = f"champion {entry.bundle[:12]}"
    path = runs / entry.path
    if not (path / _MANIFEST).is_file():
        path = _fetched(entry, runs, shelf_of(word, runs), who)
    try:
        bundle = open_bundle(path)
    except (BundleError, OSError) as error:
        raise BundleError(f"{who}: {error}; {_MEND}") from error
    if bundle.digest != entry.bundle:
        raise BundleError(f"{who}: {path} holds another bundle, {bundle.digest[:12]}; {_MEND}")
    return bundle


def publish(bundle: Bundle, runs: Path, word: str) -> None:
    """Give a registry that others share a copy, the manifest last; one beside the runs has the run itself."""
    shelf = shelf_of(word, runs)
    if not word or shelf.has(_at(bundle.digest, _MANIFEST)):
        return
    beside = [name for name in BESIDE if name != _MANIFEST and (bundle.path / name).is_file()]
    for name in (*bundle.manifest.files, *beside, _MANIFEST):
        shelf.upload(bundle.path / name, _at(bundle.digest, name))


def forget_fetched(runs: Path, needed: set[str]) -> None:
    """Copies of bundles that no name means any more; they can be fetched again."""
    for path in (runs / _FETCHED).glob("*"):
        if path.name not in needed:
            shutil.rmtree(path)


def _fetched(entry: Entry, runs: Path, shelf: Shelf, who: str) -> Path:
    """Several processes may come for it at once; the first to be done is the one whose copy stays."""
    target = runs / _FETCHED / entry.bundle
    if target.is_dir():
        return target
    if not shelf.has(_at(entry.bundle, _MANIFEST)):
        raise BundleError(
            f"{who}: {runs / entry.path} is gone, and the registry {shelf.where} has no copy of it; {_MEND}"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{entry.bundle[:12]}."))
    try:
        for name in _names(entry, shelf, who):
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            shelf.download(_at(entry.bundle, name), aside / name)
        _placed(aside, target)
    except FileNotFoundError as error:
        raise BundleError(f"{who}: the copy in the registry {shelf.where} is not whole; {_MEND}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def _placed(aside: Path, target: Path) -> None:
    try:
        os.rename(aside, target)
    except OSError:
        if not target.is_dir():
            raise


def _names(entry: Entry, shelf: Shelf, who: str) -> list[str]:
    """What the manifest names, none of it outside the bundle."""
    (raw,) = shelf.read([_at(entry.bundle, _MANIFEST)])
    if digest_bytes(raw) != entry.bundle:
        raise BundleError(f"{who}: the copy in the registry {shelf.where} was altered; {_MEND}")
    try:
        manifest = Manifest.model_validate_json(raw)
    except ValidationError as error:
        raise BundleError(f"{who}: no valid manifest in the registry {shelf.where}; {_MEND}") from error
    for name in manifest.files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise BundleError(f"{who}: its manifest names {name}, outside the bundle; {_MEND}")
    return [*manifest.files, *(name for name in BESIDE if shelf.has(_at(entry.bundle, name)))]


def _at(digest: str, name: str) -> str:
    return f"bundles/{digest}/{name}"
