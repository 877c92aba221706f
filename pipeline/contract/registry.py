"""The model registry: an append-only history of changes, from which names such as `champion` follow.

It also counts the comparisons on each test set. A registry is a folder or an fsspec URL; a file in it is created once
and never changed. The bundle of an entry is in its run, or in the registry's own copy.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeAlias

from pipeline.contract.bundle import BESIDE, Bundle, Manifest, open_bundle
from pipeline.contract.config import Config
from pipeline.contract.settings.section import Frozen
from pipeline.system.errors import BundleError, ConfigError, PipelineError, ResourceError
from pipeline.system.files import NOT_SUPPORTED, digest_bytes, exclusive_lock, sync

CHAMPION = "champion"
PREVIOUS = "previous"  # follows from the history and cannot be set
BASELINE_PART = "baseline:champion"  # part of the key of evaluate: the bundle of the champion, if there is one

_CHANGE = re.compile(r"\d{6,}\.json")
_TEST_SETS = "test_sets"  # folder with one folder for each fingerprint


class Entry(Frozen):
    bundle: str  # bundle digest
    checkpoint: str  # digest of model.safetensors, to recognise the candidate itself
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
    before: str = ""  # SHA-256 of the previous change, so that changes cannot be altered or removed unnoticed
    token: str = ""  # distinguishes changes of the same second
    rollback: bool = False  # back to an entry from before: the later ones count no more


@dataclass(frozen=True)
class Registry:
    history: tuple[Change, ...] = ()  # oldest first

    @property
    def names(self) -> dict[str, Entry]:
        entries: dict[str, Entry] = {}
        for change in self.history:
            entries[change.name] = change.entry
        for champion in [name for name in entries if is_champion(name)]:
            if previous := self.previous_entry(champion):
                entries[champion.replace(CHAMPION, PREVIOUS, 1)] = previous
        return entries

    def champion_for(self, checkpoint: str | None, name: str = CHAMPION) -> Entry | None:
        """Return the newest champion of a place that is not the candidate itself."""
        past = (change.entry for change in reversed(self.history) if change.name == name)
        return next((entry for entry in past if entry.checkpoint != checkpoint), None)

    def find_entry(self, bundle: str) -> Entry | None:
        """Return the newest entry of a bundle."""
        return next((change.entry for change in reversed(self.history) if change.entry.bundle == bundle), None)

    def previous_entry(self, name: str) -> Entry | None:
        """Return the previous entry of a name, where those that were rolled back do not count."""
        entries: list[Entry] = []
        for change in (change for change in self.history if change.name == name):
            while change.rollback and len(entries) > 1 and entries[-1].bundle != change.entry.bundle:
                entries.pop()
            if entries and entries[-1].bundle == change.entry.bundle:
                entries.pop()
            entries.append(change.entry)
        return entries[-2] if len(entries) > 1 else None

    def promotion(self, entry: Entry) -> Change:
        """Return the latest change that made this entry a champion."""
        return next(change for change in reversed(self.history) if is_champion(change.name) and change.entry == entry)

    def last_change(self, name: str) -> Change | None:
        return next((change for change in reversed(self.history) if change.name == name), None)


def champion_name(config: Config) -> str:
    """Return the champion's name of the place that the settings deploy to: each cluster has its own."""
    deploy = config.deploy
    if not deploy.on_cluster or deploy.render:  # rendered manifests go to a place that others choose
        return CHAMPION
    return f"{CHAMPION}@{_server_of(deploy.context) or deploy.context}/{deploy.namespace}/{config.name}"


def _server_of(context: str) -> str:
    """Return the API server of a context, by default of the current one; empty if no kubeconfig names it."""
    files = os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    paths = [path for path in (Path(file).expanduser() for file in files.split(os.pathsep)) if path.is_file()]
    if not paths:
        return ""
    import yaml  # slow to load

    try:
        bodies = [yaml.safe_load(path.read_text()) or {} for path in paths]
        context = context or next((body["current-context"] for body in bodies if body.get("current-context")), "")
        contexts = {item["name"]: item["context"] for body in bodies for item in body.get("contexts") or []}
        clusters = {item["name"]: item["cluster"] for body in bodies for item in body.get("clusters") or []}
        return str(clusters[contexts[context]["cluster"]]["server"]).rstrip("/")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError):
        return ""  # a command that connects reports what is wrong


def is_champion(name: str) -> bool:
    return name.partition("@")[0] == CHAMPION


@dataclass(frozen=True)
class ProposedChange:
    """A change that was decided on after reading the history."""

    name: str
    entry: Entry
    reason: str
    rollback: bool = False


def read_registry(runs: Path, url: str) -> Registry:
    """Read the history; `url` is the setting `registry`."""
    return Registry(_history(open_store(url, runs))[0])


def change_registry(runs: Path, url: str, decide: Callable[[Registry], ProposedChange | None]) -> Registry:
    """Append the change that `decide` returns for the current history; None appends none.

    The change gets the next number. If another writer was faster and has taken that number, `decide` is called again
    with the longer history, so no change is lost or based on an outdated state.
    """
    store, length = open_store(url, runs), -1
    while True:
        history, digest = _history(store)
        if len(history) <= length:
            raise PipelineError(f"{store.where}: an existing change is not listed; try again later")
        length = len(history)
        proposed = decide(Registry(history))
        if proposed is None:
            return Registry(history)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        change = Change(**vars(proposed), at=now, by=current_user(), before=digest, token=secrets.token_hex(8))
        if store.create(f"{length + 1:06d}.json", (change.model_dump_json(indent=2) + "\n").encode()):
            return Registry((*history, change))


class Comparison(Frozen):
    """One file of a test set's folder: a candidate was compared with a baseline on it."""

    at: str
    key: str  # digest of the candidate's predictions, so that they count once
    run: str
    by: str = ""
    token: str = ""


class ComparisonCount(NamedTuple):
    """Which comparison on a test set this is."""

    number: int = 1
    authors: int = 1  # of this one and those before it
    unrecorded: str = ""  # why it could not be recorded, if so


FIRST_COMPARISON = ComparisonCount()


def count_comparison(runs: Path, url: str, fingerprint: str, key: str, run: str) -> ComparisonCount:
    """Record a comparison on a test set and count it; one that was recorded before keeps its number."""
    store, folder = open_store(url, runs), f"{_TEST_SETS}/{fingerprint}"
    while True:
        files = _read_numbered(store, folder)
        past = {number: Comparison.parse(raw, f"{store.where}/{path}", _COPY) for number, path, raw in files}
        number = next((number for number, each in past.items() if each.key == key), max(past, default=0) + 1)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        comparison = Comparison(at=now, key=key, run=run, by=current_user(), token=secrets.token_hex(8))
        authors = len({each.by for earlier, each in ({number: comparison} | past).items() if earlier <= number})
        if number in past:
            return ComparisonCount(number, authors)
        try:
            is_new = store.create(f"{folder}/{number:06d}.json", (comparison.model_dump_json(indent=2) + "\n").encode())
        except (ConfigError, ResourceError) as error:  # as in a pod that may only read the registry
            reason = f"this comparison could not be recorded and will not count: {error}"
            return ComparisonCount(number, authors, reason)
        if is_new:
            return ComparisonCount(number, authors)


def _read_numbered(store: RegistryStore, folder: str = "") -> Iterator[tuple[int, str, bytes]]:
    """Return number, path and content of the numbered files of a folder, in order."""
    names = sorted((name for name in store.names(folder) if _CHANGE.fullmatch(name)), key=lambda name: int(name[:-5]))
    paths = [f"{folder}/{name}".removeprefix("/") for name in names]
    return zip((int(name[:-5]) for name in names), paths, store.read(paths), strict=True)


_COPY = "restore it from a copy"


def _history(store: RegistryStore) -> tuple[tuple[Change, ...], str]:
    """Return all changes, after checking that each refers to the previous one, and the digest of the last one."""
    changes: list[Change] = []
    digest = ""  # that the first change refers to
    for number, path, raw in _read_numbered(store):
        if number != len(changes) + 1:
            raise PipelineError(f"{store.where}: change {len(changes) + 1:06d}.json is missing; restore it from a copy")
        change = Change.parse(raw, f"{store.where}/{path}", _COPY)
        if change.before != digest:
            raise PipelineError(
                f"{store.where}/{path}: does not follow from the change before it, so one of the two was altered; "
                "restore them from a copy"
            )
        changes.append(change)
        digest = digest_bytes(raw)
    return tuple(changes), digest


def current_user() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


_HOW_TO_FIX = "restore it, or name another champion with `pipe registry promote`"
_FETCHED = ".champions"  # below the runs: bundles downloaded from a registry
_MANIFEST = "manifest.json"


def champion_bundle(entry: Entry, runs: Path, url: str) -> Bundle:
    """Return the verified bundle of an entry."""
    champion = f"champion {entry.bundle[:12]}"
    path = runs / entry.path
    if not (path / _MANIFEST).is_file():
        path = _fetch(entry, runs, open_store(url, runs), champion)
    try:
        bundle = open_bundle(path)
    except (BundleError, OSError) as error:
        raise BundleError(f"{champion}: {error}; {_HOW_TO_FIX}") from error
    if bundle.digest != entry.bundle:
        raise BundleError(f"{champion}: {path} holds another bundle, {bundle.digest[:12]}; {_HOW_TO_FIX}")
    return bundle


def publish(bundle: Bundle, runs: Path, url: str) -> None:
    """Upload a copy to a shared registry, the manifest last; a registry next to the runs needs none."""
    store = open_store(url, runs)
    if not url or store.has(_bundle_object(bundle.digest, _MANIFEST)):
        return
    extra_files = [name for name in BESIDE if name != _MANIFEST and (bundle.path / name).is_file()]
    for name in (*bundle.manifest.files, *extra_files, _MANIFEST):
        store.upload(bundle.path / name, _bundle_object(bundle.digest, name))


def forget_fetched(runs: Path, needed: set[str]) -> None:
    """Delete downloaded bundles that no name refers to; they can be downloaded again."""
    for path in (runs / _FETCHED).glob("*"):
        if path.name not in needed:
            shutil.rmtree(path)


def _fetch(entry: Entry, runs: Path, store: RegistryStore, champion: str) -> Path:
    """Download a bundle; if several processes do so at once, the first complete copy is kept."""
    target = runs / _FETCHED / entry.bundle
    if target.is_dir():
        return target
    if not store.has(_bundle_object(entry.bundle, _MANIFEST)):
        raise BundleError(
            f"{champion}: {runs / entry.path} is gone, and the registry {store.where} has no copy of it; {_HOW_TO_FIX}"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{entry.bundle[:12]}."))
    try:
        for name in _bundle_files(entry, store, champion):
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            store.download(_bundle_object(entry.bundle, name), temporary / name)
        _rename_once(temporary, target)
    except FileNotFoundError as error:
        raise BundleError(
            f"{champion}: the copy in the registry {store.where} is not complete; {_HOW_TO_FIX}"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _rename_once(aside: Path, target: Path) -> None:
    try:
        os.rename(aside, target)
    except OSError:
        if not target.is_dir():
            raise


def _bundle_files(entry: Entry, store: RegistryStore, champion: str) -> list[str]:
    """Return the files that the manifest names, after checking that they are inside the bundle."""
    (raw,) = store.read([_bundle_object(entry.bundle, _MANIFEST)])
    if digest_bytes(raw) != entry.bundle:
        raise BundleError(f"{champion}: the copy in the registry {store.where} was altered; {_HOW_TO_FIX}")
    manifest = Manifest.parse(raw, f"{champion}: the manifest in the registry {store.where}", _HOW_TO_FIX, BundleError)
    for name in manifest.files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise BundleError(f"{champion}: its manifest names {name}, outside the bundle; {_HOW_TO_FIX}")
    return [*manifest.files, *(name for name in BESIDE if store.has(_bundle_object(entry.bundle, name)))]


def _bundle_object(digest: str, name: str) -> str:
    return f"bundles/{digest}/{name}"


# File systems that create an object in one request, which the store rejects if the name is taken.
_EXCLUSIVE = ("memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")
_FOLDERS = ("file://", "local://")
_TAKEN = (409, 412)  # HTTP status of a taken name, if the library does not translate it
_TEST_OBJECT = "exclusive"  # an object created twice, to check that the store rejects the second one


RegistryStore: TypeAlias = "FolderStore | ObjectStore"


def open_store(url: str, runs: Path) -> RegistryStore:
    """Open the store of the setting `registry`; empty: next to the runs. Paths are relative to the project."""
    if not url:
        return FolderStore(runs / "registry")
    folder = next((url.removeprefix(start) for start in _FOLDERS if url.startswith(start)), url)
    if "://" in folder or "::" in folder:
        return ObjectStore(url)
    return FolderStore(Path(os.path.normpath((runs.parent / Path(folder).expanduser()).absolute())))


class FolderStore:
    """A folder; a complete file gets its name by a hard link, which never replaces another file."""

    def __init__(self, path: Path) -> None:
        self.path, self.where = path, str(path)  # `where` is for messages

    def names(self, folder: str = "") -> list[str]:
        """Return the names of its direct members, or of those of a folder in it."""
        try:
            return [path.name for path in (self.path / folder).iterdir()]
        except FileNotFoundError:  # nothing has been written yet
            return []
        except OSError as error:  # an empty result would hide the champion from the gate
            raise _failure(f"read {self.where} of the registry", error) from error

    def read(self, names: Sequence[str]) -> list[bytes]:
        contents = []
        for name in names:
            try:
                contents.append((self.path / name).read_bytes())
            except OSError as error:
                raise _failure(f"read {self.where}/{name} of the registry", error) from error
        return contents

    def has(self, name: str) -> bool:
        return (self.path / name).is_file()

    def create(self, name: str, data: bytes) -> bool:
        """Create it completely or not at all; return False if it exists, even if several processes try at once."""
        path = self.path / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fchmod(file.fileno(), 0o444)
                    os.fsync(file.fileno())
                is_new = _link(Path(temporary), path)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary)
            sync(path.parent)
        except OSError as error:
            raise _failure(f"write the registry {self.where}", error) from error
        return is_new

    def upload(self, source: Path, name: str) -> None:
        target = self.path / name
        aside = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, aside)
            os.replace(aside, target)
        except OSError as error:
            raise _failure(f"write the registry {self.where}", error) from error

    def download(self, name: str, target: Path) -> None:
        shutil.copyfile(self.path / name, target)


def _link(aside: Path, path: Path) -> bool:
    try:
        os.link(aside, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            raise
        return _rename_exclusively(aside, path)
    return True


_NEED = (
    "and no hard links either, so that writers could overwrite each other; to fix it: set `registry` to a folder on "
    "another one, or to a bucket (s3://, gs:// or az://)"
)


def _rename_exclusively(aside: Path, path: Path) -> bool:
    """Rename under a lock, for file systems without hard links."""
    with exclusive_lock(path.parent / ".lock", _NEED):
        if path.exists():
            return False
        aside.rename(path)
        return True


def _failure(action: str, error: OSError) -> ResourceError:
    reason = os.strerror(error.errno).lower() if error.errno else str(error)
    return ResourceError(f"cannot {action}: {reason}; to fix it: correct that and run the command again")


class ObjectStore:
    """An fsspec URL, where each object is created in one request."""

    def __init__(self, url: str) -> None:
        self.where = url.rstrip("/")
        try:
            from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # imported only for URLs

            # A cached listing would miss what other processes write.
            self._files, self._path = url_to_fs(self.where, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"registry={url}: {error}; or name a folder") from error

    def names(self, folder: str = "") -> list[str]:
        self._files.invalidate_cache()  # other processes write there too
        with self._translate_errors():
            try:
                paths: list[str] = self._files.ls(self._object_path(folder) if folder else self._path, detail=False)
            except FileNotFoundError:
                return []
        return [path.rstrip("/").rpartition("/")[2] for path in paths]

    def read(self, names: Sequence[str]) -> list[bytes]:
        """Read all objects concurrently, because sequential requests are slow."""
        if not names:
            return []
        self._files.invalidate_cache()
        with self._translate_errors():
            contents: Any = self._files.cat([self._object_path(name) for name in names])
        return [contents[self._object_path(name)] for name in names]

    def has(self, name: str) -> bool:
        self._files.invalidate_cache()
        with self._translate_errors():
            return bool(self._files.exists(self._object_path(name)))

    def create(self, name: str, data: bytes) -> bool:
        self._check_exclusive_create()
        if self._create(name, data):
            return True
        # If a response was lost, the library repeats the request and finds its own object.
        return self.read([name]) == [data]

    def upload(self, source: Path, name: str) -> None:
        with self._translate_errors():
            self._files.put_file(str(source), self._object_path(name))

    def download(self, name: str, target: Path) -> None:
        with self._translate_errors():
            self._files.get_file(self._object_path(name), str(target))

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except Exception as error:  # each library has its own
            reason = f"{type(error).__name__}: {error}"
            raise ResourceError(
                f"the registry {self.where} cannot be reached: {reason}; to fix it: correct that and try again"
            ) from error

    def _check_exclusive_create(self) -> None:
        """Check the file system and this store itself: some S3-compatible stores ignore the condition."""
        protocols = self._files.protocol
        names = {protocols} if isinstance(protocols, str) else set(protocols)
        if names.isdisjoint(_EXCLUSIVE) or (self._create(_TEST_OBJECT, b"") and self._create(_TEST_OBJECT, b"")):
            raise ConfigError(
                f"registry={self.where}: it can be read, but concurrent writers could overwrite each other, because "
                "it cannot create an object only if it does not exist; use a folder, or a bucket of s3://, gs:// or az://"
            )

    def _create(self, name: str, data: bytes) -> bool:
        try:
            self._files.pipe_file(self._object_path(name), data, mode="create")
        except FileExistsError:
            return False
        except Exception as error:  # each library has its own
            if getattr(error, "code", None) in _TAKEN:
                return False
            raise ResourceError(
                f"cannot write the registry {self.where}: {error}; to fix it: correct that and try again"
            ) from error
        return True

    def _object_path(self, name: str) -> str:
        return f"{self._path}/{name}"
