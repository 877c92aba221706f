"""The project folder and its runs: create, find, record and lock them.

All locks are the kernel's: they are released when their process ends, however it ends. On a file system without locks
a command goes on with a warning, unless it needs one.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import platform
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TextIO, TypeAlias

from pipeline.contract.config import Config, load_config
from pipeline.contract.run import Run, RunFile, StepRecord, all_runs, sealed_text
from pipeline.contract.settings.section import PIPE
from pipeline.system.errors import ConfigError, PipelineError, ResourceError
from pipeline.system.files import (
    digest_file,
    digest_mapping,
    digest_tree,
    empty_folders,
    lock_file,
    no_locks,
    write_atomic,
)

PACKAGES = ("torch", "numpy", "onnx", "onnxscript", "onnxruntime-gpu", "onnxruntime", "kserve", "pydantic", PIPE)
_POLL_SECONDS = 0.2
_GIT_TIMEOUT_SECONDS = 10

History: TypeAlias = list[tuple[Run, RunFile]]


@dataclass(frozen=True)
class Project:
    root: Path  # working directory of every step
    runs: Path

    def config(self, overrides: Sequence[str] = ()) -> Config:
        return load_config(self.root / "pipe.yaml", overrides)


def find_project(folder: Path) -> Project:
    """Return the project in a folder that has a `pipe.yaml`."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; `pipe init {folder}` makes a project")
    folder = folder.resolve()
    if not (folder / "pipe.yaml").is_file():
        raise ConfigError(f"no pipe.yaml in {folder}: `pipe init NAME` makes a project, `pipe demo` runs an example")
    return Project(folder, folder / "runs")


def example_folder(name: str) -> Path:
    """Return an example that ships with `pipe`: next to the packages in a checkout, inside this one when installed."""
    package_folder = Path(__file__).resolve().parent
    for folder in (package_folder.parent / "examples" / name, package_folder / "examples" / name):
        if (folder / "task.py").is_file():
            return folder
    raise ConfigError(f"no example {name!r} in this installation")


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def create_run(
    runs: Path,
    config: Config,
    wanted: tuple[str, ...],
    parent: str,
    study: str = "",
    trial: int | None = None,
    starting_point: str = "",
) -> Run:
    while True:
        created = datetime.now(UTC)
        run = Run(runs / f"{created:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}")
        with contextlib.suppress(FileExistsError):  # another run began in this second with the same four digits
            return begin_run(run, config, wanted, parent, study, trial, created, starting_point)


def begin_run(
    run: Run,
    config: Config,
    wanted: tuple[str, ...],
    parent: str = "",
    study: str = "",
    trial: int | None = None,
    created: datetime | None = None,
    starting_point: str = "",
) -> Run:
    """Create the run in a directory whose name is given, as by a workflow."""
    (run.path / "logs").mkdir(parents=True)
    body = RunFile(
        id=run.id,
        created=(created or datetime.now(UTC)).isoformat(timespec="microseconds"),
        parent=parent,
        wanted=wanted,
        config=config.model_dump(mode="json"),
        environment=describe_environment() | describe_commit(run.runs.parent),
        study=study,
        trial=trial,
        starting_point=starting_point,
    )
    try:
        write_run(run, body)
    except OSError:  # such as a full disk: without run.json it is no run
        shutil.rmtree(run.path, ignore_errors=True)
        raise
    return run


def write_run(run: Run, body: RunFile) -> None:
    path = run.path / "run.json"
    write_atomic(path, sealed_text(body, path.read_bytes() if path.is_file() else None))


def write_record(run: Run, record: StepRecord) -> StepRecord:
    body = run.read()
    write_run(run, body.model_copy(update={"steps": {**body.steps, record.step: record}}))
    return record


def load_history(runs: Path) -> History:
    """Return every run with its records, newest first; those that cannot be read are left out."""
    history: History = []
    for run in all_runs(runs):
        with contextlib.suppress(PipelineError):
            history.append((run, run.read()))
    return history


def unreadable_runs(runs: Path, history: History) -> list[tuple[Run, str]]:
    """Return the runs that a history leaves out, newest first, and why."""
    readable = {run for run, _ in history}
    return [(run, run.problem) for run in all_runs(runs) if run not in readable]


def find_run(runs: Path, name: str) -> Run:
    """Find a run by `latest` (the newest that can be read), its id, a unique beginning of it, or its path."""
    run = _locate_run(runs, name)
    run.read()  # a run that cannot be read takes part in nothing
    return run


def _locate_run(runs: Path, name: str) -> Run:
    if (Path(name) / "run.json").is_file():
        return Run(Path(name).resolve())
    existing = all_runs(runs)
    if not existing:
        raise ConfigError(f"no runs in {runs} yet; `pipe run all` makes one")
    if name == "latest":
        return next((run for run in existing if not run.problem), existing[0])
    matches = [run for run in existing if run.id.startswith(name)]
    if len(matches) != 1:
        newest = ", ".join(run.id for run in existing[:3])
        raise ConfigError(f"{'no' if not matches else 'more than one'} run {name!r} in {runs} (newest: {newest})")
    return matches[0]


def open_run(name: str = "latest", folder: str | Path = ".") -> Run:
    """Return a run by its path, or one of the project in a folder by its id, the beginning of it, or `latest`."""
    is_path = (Path(name) / "run.json").is_file()
    return find_run(Path() if is_path else find_project(Path(folder)).runs, name)


def changed_outputs(run: Run, record: StepRecord) -> list[str]:
    """Return the files of a complete step that were removed, changed or added since it was recorded."""
    directory = run.output(record.step)
    current = digest_tree(directory) if directory.is_dir() else {}
    names = current.keys() | record.outputs.keys()
    return sorted(name for name in names if current.get(name) != record.outputs.get(name))


def changed_folders(run: Run, record: StepRecord) -> list[str]:
    """Return the empty folders that were removed or added since a step was recorded."""
    return sorted(set(empty_folders(run.output(record.step))) ^ set(record.empty_folders))


def publish_step(run: Run, step: str) -> tuple[Mapping[str, str], str]:
    """Rename a finished step's directory to its final name and return its digests."""
    partial, output = run.partial(step), run.output(step)
    outputs = digest_tree(partial)
    if output.exists():  # an earlier attempt in a resumed run
        shutil.rmtree(output)
    partial.rename(output)
    return outputs, digest_mapping(outputs)


def link_outputs(source: Run, target: Run, record: StepRecord) -> None:
    """Hard-link an earlier run's files, or copy them where that is not possible."""
    partial = target.partial(record.step)
    shutil.rmtree(partial, ignore_errors=True)
    for name in record.outputs:
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        link_or_copy(source.output(record.step) / name, partial / name)
    for name in record.empty_folders:
        (partial / name).mkdir(parents=True, exist_ok=True)
    partial.mkdir(exist_ok=True)
    partial.rename(target.output(record.step))


def describe_environment() -> dict[str, str]:
    interpreter = {"python": platform.python_version(), "platform": platform.platform()}
    return interpreter | installed_versions(PACKAGES)


COMMIT, WORKING_TREE = "git commit", "git working tree"  # names in the environment of a run


def describe_commit(root: Path) -> dict[str, str]:
    """Return the commit of the project, and whether files of it differ; empty where it is in no repository."""
    try:
        commit = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--", ".", ":(exclude)runs")
    except (OSError, subprocess.SubprocessError):  # no git, or no repository with a commit
        return {}
    return {COMMIT: commit, WORKING_TREE: "uncommitted changes" if changed else "clean"}


def _git(root: Path, *arguments: str) -> str:
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}  # git commands of the user must not fail meanwhile
    done = subprocess.run(
        ["git", *arguments], cwd=root, env=environment, capture_output=True, text=True, check=True,
        timeout=_GIT_TIMEOUT_SECONDS,
    )  # fmt: skip
    return done.stdout.strip()


def installed_versions(packages: tuple[str, ...]) -> dict[str, str]:
    versions = {}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def data_file_digests(root: Path, patterns: tuple[str, ...]) -> dict[str, str]:
    """Return the digests of the data files a project declares; a folder means all files below it."""
    digests: dict[str, str] = {}
    for pattern in patterns:
        if Path(pattern).is_absolute():
            raise ConfigError(f"prepare.files: {pattern!r} must be relative to the project, as in '../data/*.csv'")
        paths = (root / pattern).rglob("*") if (root / pattern).is_dir() else root.glob(pattern)
        files = [path for path in sorted(paths) if path.is_file()]
        if not files:
            raise ConfigError(f"prepare.files: no file matches {pattern!r} in {root}")
        digests |= {path.relative_to(root).as_posix(): digest_file(path) for path in files}
    return digests


def link_or_copy(source: Path | str, target: Path | str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)


OnWait: TypeAlias = Callable[[str], None]  # reports what is waited for; without one, a lock that is taken raises


@contextlib.contextmanager
def lock_runs(runs: Path, shared: bool = False, on_wait: OnWait | None = None, need: str = "") -> Iterator[None]:
    """Lock the folder of runs against all other commands, or `shared` for commands that only add runs of their own.

    The `need` for a lock is an error where there are none.
    """
    try:
        runs.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise ResourceError(f"{runs}: is a file, but must be the folder of runs; move it away") from error
    path = runs / ".lock"

    def owner() -> str:  # a shared lock loses its name when one of its owners releases it; those of runs keep theirs
        locks = [path, *(run.path / ".lock" for run in all_runs(runs) if is_locked(run))]
        return lock_owner(next((lock for lock in locks if lock.read_text()), path))

    with _wait_for_lock(path, owner, f"{runs}: ", "is working here", shared, on_wait) as lock:
        if not lock.is_effective:
            if need:
                raise no_locks(runs, need)
            _warn_without_locks(runs)
        yield


@contextlib.contextmanager
def lock_run(run: Run, on_wait: OnWait | None = None) -> Iterator[None]:
    """Lock one run for the command that works on it."""
    path = run.path / ".lock"
    with _wait_for_lock(path, lambda: lock_owner(path), f"run {run.id}: ", "is working on it", False, on_wait) as lock:
        if not lock.is_effective:
            _warn_without_locks(run.runs)
        yield


@functools.cache  # once in a command
def _warn_without_locks(runs: Path) -> None:
    print(
        f"warning: {runs}: this file system has no locks (Lustre has them with the mount option `flock`), "
        "so do not let two commands work on one run at the same time",
        file=sys.stderr,
        flush=True,
    )


def is_locked(run: Run) -> bool:
    """Return whether a command is working on the run now; False where there are no locks."""
    with contextlib.suppress(FileNotFoundError), (run.path / ".lock").open() as file:
        try:
            lock_file(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@contextlib.contextmanager
def lock_service(runs: Path, on_wait: OnWait | None = None) -> Iterator[None]:
    """Lock what is deployed, and the registry; a command that has this lock may take it again."""
    path = runs / ".service.lock"
    with lock_runs(runs, shared=True, on_wait=on_wait):
        if path in _held:
            yield
            return
        with _wait_for_lock(path, lambda: lock_owner(path), f"{runs}: ", "is changing the service", False, on_wait):
            _held.add(path)
            try:
                yield
            finally:
                _held.remove(path)


def lock_place(runs: Path, config: Config) -> contextlib.AbstractContextManager[None]:
    """Lock what is deployed on this machine; on a cluster, a lease at the place does so."""
    return lock_runs(runs, shared=True) if config.deploy.on_cluster else lock_service(runs)


_held: set[Path] = set()


@contextlib.contextmanager
def _wait_for_lock(
    path: Path, owner: Callable[[], str], place: str, activity: str, shared: bool, on_wait: OnWait | None
) -> Iterator[FileLock]:
    lock = try_lock(path, shared)
    if lock is None and on_wait is None:
        raise ResourceError(f"{place}{owner()} {activity}; wait until it ends, or end it")
    if lock is None and on_wait is not None:
        on_wait(f"{owner()} {activity}; waiting for it")
    while lock is None:
        time.sleep(_POLL_SECONDS)
        lock = try_lock(path, shared)
    with lock:
        yield lock


def try_lock(path: Path, shared: bool = False) -> FileLock | None:
    """Return a lock that lasts until it is released or this process ends; None where another process has it."""
    file = path.open("a+")
    try:
        is_effective = lock_file(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return FileLock(file, is_effective)


class FileLock:
    """A lock on a file, which contains the owner's name meanwhile."""

    def __init__(self, file: TextIO, is_effective: bool) -> None:
        self._file = file
        self.is_effective = is_effective  # False where there are no locks
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "command": " ".join(sys.argv[1:])}
        file.truncate(0)
        file.write(json.dumps(owner))
        file.flush()

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        if not self._file.closed:
            self._file.truncate(0)  # also where others share the lock: the last name written may be this one
            self._file.close()


def lock_owner(path: Path) -> str:
    try:
        owner = json.loads(path.read_text())
    except ValueError:  # read between truncate and write
        return "another `pipe`"
    return f"`pipe {owner['command']}` (pid {owner['pid']} on {owner['host']})"
