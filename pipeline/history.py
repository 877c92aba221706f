"""The runs of a project: making one, finding earlier ones, checking and sharing their files.

Where a command works: the project folder with `pipe.yaml`, and the folder of its runs.

Who may change a runs directory: one `pipe` at a time, or several searches; whoever comes second learns who holds it.

All locks are the kernel's, held as long as the process lives, so a killed owner leaves none behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TextIO, TypeAlias

from pipeline.contract.config import Config, load_config
from pipeline.contract.errors import ConfigError, ResourceError
from pipeline.contract.files import digest_file, digest_mapping, digest_tree, write_atomic
from pipeline.contract.run import Run, RunFile, StepRecord, all_runs

PACKAGES = ("torch", "numpy", "onnx", "onnxscript", "onnxruntime-gpu", "onnxruntime", "kserve", "pydantic")


History: TypeAlias = list[tuple[Run, RunFile]]


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def create_run(
    runs: Path, config: Config, wanted: tuple[str, ...], parent: str, study: str = "", trial: int | None = None
) -> Run:
    began = datetime.now(UTC)
    run = Run(runs / f"{began:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}")
    return begin_run(run, config, wanted, parent, study, trial, began)


def begin_run(
    run: Run,
    config: Config,
    wanted: tuple[str, ...],
    parent: str = "",
    study: str = "",
    trial: int | None = None,
    began: datetime | None = None,
) -> Run:
    """In a directory that somebody else has named, unless the time it began names it."""
    (run.path / "logs").mkdir(parents=True)
    body = RunFile(
        id=run.id,
        created=(began or datetime.now(UTC)).isoformat(timespec="microseconds"),
        parent=parent,
        wanted=wanted,
        config=config.model_dump(mode="json"),
        environment=environment(),
        study=study,
        trial=trial,
    )
    write_run(run, body)
    return run


def write_run(run: Run, body: RunFile) -> None:
    write_atomic(run.path / "run.json", body.model_dump_json(indent=2) + "\n")


def write_record(run: Run, record: StepRecord) -> StepRecord:
    body = run.read()
    write_run(run, body.model_copy(update={"steps": {**body.steps, record.step: record}}))
    return record


def load_history(runs: Path) -> History:
    """Every run with its records, newest first."""
    return [(run, run.read()) for run in all_runs(runs)]


def find_run(runs: Path, name: str) -> Run:
    """`latest`, an id, or a unique beginning of one; or the path of a run directory."""
    if (Path(name) / "run.json").is_file():
        return Run(Path(name).resolve())
    found = all_runs(runs)
    if not found:
        raise ConfigError(f"no runs in {runs} yet; `pipe run all` makes one")
    if name == "latest":
        return found[0]
    matches = [run for run in found if run.id.startswith(name)]
    if len(matches) != 1:
        known = ", ".join(run.id for run in found[:3])
        raise ConfigError(f"{'no' if not matches else 'more than one'} run {name!r} in {runs} (newest: {known})")
    return matches[0]


def changed_outputs(run: Run, record: StepRecord) -> list[str]:
    """Files of a complete step that are gone, altered, or were not there when it was sealed."""
    directory = run.output(record.step)
    found = digest_tree(directory) if directory.is_dir() else {}
    return sorted(name for name in found.keys() | record.outputs.keys() if found.get(name) != record.outputs.get(name))


def seal(run: Run, step: str) -> tuple[Mapping[str, str], str]:
    """Give a finished step's directory its real name, and its digests."""
    partial, output = run.partial(step), run.output(step)
    outputs = digest_tree(partial)
    if output.exists():  # an earlier attempt in a resumed run
        shutil.rmtree(output)
    partial.rename(output)
    return outputs, digest_mapping(outputs)


def link_outputs(source: Run, target: Run, record: StepRecord) -> None:
    """Share an earlier run's files: the same bytes, no copy."""
    partial = target.partial(record.step)
    shutil.rmtree(partial, ignore_errors=True)
    for name in record.outputs:
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        _link_or_copy(source.output(record.step) / name, partial / name)
    partial.mkdir(exist_ok=True)
    partial.rename(target.output(record.step))


def environment() -> dict[str, str]:
    found = {"python": platform.python_version(), "platform": platform.platform()}
    return found | installed_versions(PACKAGES)


def installed_versions(packages: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def data_files(root: Path, patterns: tuple[str, ...], word: str = "prepare.files") -> dict[str, str]:
    """Digests of the data files a project declares; a pattern that finds nothing is a mistake."""
    found: dict[str, str] = {}
    for pattern in patterns:
        files = [path for path in sorted(root.glob(pattern)) if path.is_file()]
        if not files:
            raise ConfigError(f"{word}: no file matches {pattern!r} in {root}")
        found |= {path.relative_to(root).as_posix(): digest_file(path) for path in files}
    return found


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)


@dataclass(frozen=True)
class Project:
    root: Path  # every step runs here
    runs: Path
    embedded: bool = False  # the digits example, because the folder has no pipe.yaml

    def config(self, overrides: Sequence[str] = ()) -> Config:
        return load_config(self.root / "pipe.yaml", overrides)


def find_project(folder: Path) -> Project:
    """The folder itself, or the embedded example when it has no `pipe.yaml`."""
    folder = folder.resolve()
    if (folder / "pipe.yaml").is_file():
        return Project(folder, folder / "runs")
    return Project(example("digits"), folder / "runs", embedded=True)


def example(name: str) -> Path:
    """An example that ships with `pipe`: beside the packages in a checkout, inside ours when installed."""
    here = Path(__file__).resolve().parent
    for place in (here.parent / "examples" / name, here / "examples" / name):
        if (place / "pipe.yaml").is_file():
            return place
    raise ConfigError(f"no example {name!r} in this installation")


_POLL_SECONDS = 0.2


@contextlib.contextmanager
def locked(runs: Path, shared: bool = False, told: Callable[[str], None] | None = None) -> Iterator[None]:
    """Alone, or `shared` with others that only add runs of their own, as the trials of `pipe tune` do.

    Who holds it is an error; or `told`, and then waited for.
    """
    try:
        runs.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise ResourceError(f"{runs}: a file stands where the folder of runs belongs; move it away") from error
    path = runs / ".lock"
    held = take(path, shared)
    if held is None and told is None:
        raise ResourceError(f"{runs}: {owner_of(path)} is working here; wait for it or end it")
    if held is None and told is not None:
        told(f"{owner_of(path)} is working here; waiting for it")
    while held is None:
        time.sleep(_POLL_SECONDS)
        held = take(path, shared)
    with held:
        yield


@contextlib.contextmanager
def waited(path: Path) -> Iterator[None]:
    """For work of a moment: whoever comes second waits."""
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def take(path: Path, shared: bool = False) -> Held | None:
    """A lock that is held until it is closed or this process ends; None while somebody else has it."""
    file = path.open("a+")
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return Held(file)


class Held:
    """The owner's name stands in the file as long as it is held."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "command": " ".join(sys.argv[1:])}
        file.truncate(0)
        file.write(json.dumps(owner))
        file.flush()

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        if not self._file.closed:
            self._file.truncate(0)  # of several that share it, the last to come may be the first to go
            self._file.close()


def owner_of(path: Path) -> str:
    """Who holds a lock, as far as the file tells."""
    try:
        owner = json.loads(path.read_text())
    except ValueError:  # caught between truncate and write
        return "another `pipe`"
    return f"`pipe {owner['command']}` (pid {owner['pid']} on {owner['host']})"
