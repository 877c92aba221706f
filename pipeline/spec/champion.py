"""The bundle that the registry means: in its run, or in the registry's own copy of it."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path, PurePosixPath

from pydantic import ValidationError

from pipeline.spec.bundle import BESIDE, Bundle, Manifest, open_bundle
from pipeline.spec.digest import digest_bytes
from pipeline.spec.errors import BundleError
from pipeline.spec.registry import Entry
from pipeline.spec.shelf import Shelf, shelf_of

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
