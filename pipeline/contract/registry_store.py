"""Where a registry stands: a folder, or an fsspec URL. What is made there is made once and never changed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from pipeline.contract.errors import ConfigError, ResourceError
from pipeline.contract.files import sync_directory

# Filesystems that make an object in one request which the store itself refuses where the name is taken.
_EXCLUSIVE = ("memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")
_FOLDERS = ("file://", "local://")
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_TAKEN = (409, 412)  # how a store answers over HTTP that the name is taken, where its library does not translate it
_PROOF = "exclusive"  # an object made twice, to see the second one refused


class Shelf(Protocol):
    where: str  # as a person names it

    def names(self) -> list[str]:
        """Of what stands there directly."""

    def read(self, names: Sequence[str]) -> list[bytes]: ...

    def has(self, name: str) -> bool: ...

    def create(self, name: str, data: bytes) -> bool:
        """Whole or not at all, and False where it is there already, however many try at once."""

    def upload(self, source: Path, name: str) -> None: ...

    def download(self, name: str, target: Path) -> None: ...


def shelf_of(word: str, runs: Path) -> Shelf:
    """By the word of the configuration; empty: beside the runs. A relative folder begins where they stand."""
    if not word:
        return FolderShelf(runs / "registry")
    folder = next((word.removeprefix(start) for start in _FOLDERS if word.startswith(start)), word)
    if "://" in folder or "::" in folder:
        return ObjectShelf(word)
    return FolderShelf(Path(os.path.normpath((runs.parent / Path(folder).expanduser()).absolute())))


class FolderShelf:
    """A name is given to a file that is complete and on the disk: by a hard link, which never replaces."""

    def __init__(self, path: Path) -> None:
        self.path, self.where = path, str(path)

    def names(self) -> list[str]:
        try:
            return [path.name for path in self.path.iterdir()]
        except FileNotFoundError:  # nobody has written yet
            return []
        except OSError as error:  # taken for empty, it would hide the champion from the gate
            raise _unreadable(self.where, error) from error

    def read(self, names: Sequence[str]) -> list[bytes]:
        found = []
        for name in names:
            try:
                found.append((self.path / name).read_bytes())
            except OSError as error:
                raise _unreadable(f"{self.where}/{name}", error) from error
        return found

    def has(self, name: str) -> bool:
        return (self.path / name).is_file()

    def create(self, name: str, data: bytes) -> bool:
        path = self.path / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fchmod(file.fileno(), 0o444)
                    os.fsync(file.fileno())
                made = _named(Path(aside), path)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(aside)
            sync_directory(path.parent)
        except OSError as error:
            raise _unwritable(self.where, error) from error
        return made

    def upload(self, source: Path, name: str) -> None:
        target = self.path / name
        aside = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, aside)
            os.replace(aside, target)
        except OSError as error:
            raise _unwritable(self.where, error) from error

    def download(self, name: str, target: Path) -> None:
        shutil.copyfile(self.path / name, target)


def _named(aside: Path, path: Path) -> bool:
    try:
        os.link(aside, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return _renamed(aside, path)
    return True


def _renamed(aside: Path, path: Path) -> bool:
    """Where a file system has no hard links: one writer at a time, by a lock that ends with its process."""
    with (path.parent / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return False
        aside.rename(path)
        return True


def _unwritable(where: str, error: OSError) -> ResourceError:
    reason = os.strerror(error.errno).lower() if error.errno else str(error)
    return ResourceError(f"cannot write the registry {where}: {reason}; mend that, and give the command again")


def _unreadable(where: str, error: OSError) -> ResourceError:
    reason = os.strerror(error.errno).lower() if error.errno else str(error)
    return ResourceError(f"cannot read {where} of the registry: {reason}; mend that, and give the command again")


class ObjectShelf:
    """Behind an fsspec URL, where each object comes into being in one request."""

    def __init__(self, url: str) -> None:
        self.where = url.rstrip("/")
        try:
            from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # at first use: few give a URL

            # What it remembers of a folder is what was there before another process wrote.
            self._files, self._path = url_to_fs(self.where, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"registry={url}: {error}; or name a folder") from error

    def names(self) -> list[str]:
        self._files.invalidate_cache()  # other processes write there too
        with self._reached():
            try:
                found: list[str] = self._files.ls(self._path, detail=False)
            except FileNotFoundError:
                return []
        return [path.rstrip("/").rpartition("/")[2] for path in found]

    def read(self, names: Sequence[str]) -> list[bytes]:
        """All at once: a request after the other would take its time."""
        if not names:
            return []
        self._files.invalidate_cache()
        with self._reached():
            found: Any = self._files.cat([self._at(name) for name in names])
        return [found[self._at(name)] for name in names]

    def has(self, name: str) -> bool:
        self._files.invalidate_cache()
        with self._reached():
            return bool(self._files.exists(self._at(name)))

    def create(self, name: str, data: bytes) -> bool:
        self._prove()
        if self._made(name, data):
            return True
        # A request whose answer was lost is sent again by the library, and meets its own object.
        return self.read([name]) == [data]

    def upload(self, source: Path, name: str) -> None:
        with self._reached():
            self._files.put_file(str(source), self._at(name))

    def download(self, name: str, target: Path) -> None:
        with self._reached():
            self._files.get_file(self._at(name), str(target))

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except Exception as error:  # each library has its own
            why = f"{type(error).__name__}: {error}"
            raise ResourceError(
                f"the registry {self.where} cannot be reached: {why}; mend that, and try again"
            ) from error

    def _prove(self) -> None:
        """A filesystem known for it, and this very store: some that speak S3 pass over the condition."""
        kinds = self._files.protocol
        known = set(_EXCLUSIVE) & {kinds} if isinstance(kinds, str) else set(_EXCLUSIVE) & set(kinds)
        if not known or (self._made(_PROOF, b"") and self._made(_PROOF, b"")):
            raise ConfigError(
                f"registry={self.where}: it can be read, but two that write at once could undo each other there, as "
                "nothing makes an object only where none is; use a folder, or a bucket of s3://, gs:// or az://"
            )

    def _made(self, name: str, data: bytes) -> bool:
        try:
            self._files.pipe_file(self._at(name), data, mode="create")
        except FileExistsError:
            return False
        except Exception as error:  # each library has its own
            if getattr(error, "code", None) in _TAKEN:
                return False
            raise ResourceError(f"cannot write the registry {self.where}: {error}; mend that, and try again") from error
        return True

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"
