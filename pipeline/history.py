"""The runs of a project: making one, finding earlier ones, checking and sharing their files."""

from __future__ import annotations

import os
import platform
import secrets
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TypeAlias

from pipeline.spec.config import Config
from pipeline.spec.digest import digest_file, digest_mapping, digest_tree
from pipeline.spec.errors import ConfigError
from pipeline.spec.files import write_atomic
from pipeline.spec.run import Run, RunFile, StepRecord
from pipeline.spec.runs import all_runs

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
