"""Run directories: their paths, configuration and step records, and the main function of every step's process."""

from __future__ import annotations

import argparse
import contextlib
import errno
import itertools
import json
import logging
import os
import re
import socket
import stat
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from pipeline.contract.bundle import Bundle, Override, open_bundle, read_override
from pipeline.contract.config import Config, parse_config
from pipeline.contract.settings.section import Frozen
from pipeline.contract.signing import Trust
from pipeline.system.errors import (
    BundleError,
    PipelineError,
    ResourceError,
    StageError,
    disk_full,
    missing_extra,
    write_error,
)
from pipeline.system.files import digest_bytes, digest_file, digest_mapping, read_object
from pipeline.system.processes import Rank, watch_parent

_SECOND = len("20260131-235959")  # at the beginning of a run's name
_TIMED = re.compile(r"\d{8}-\d{6}-")


def all_runs(runs: Path) -> list[Run]:
    """Return the runs, newest first. Names begin with the second of creation; within a second, run.json decides."""
    if not runs.is_dir():
        return []
    newest_first = [Run(path) for path in runs.iterdir() if (path / "run.json").is_file()]
    newest_first.sort(key=lambda run: (_second(run), run.id), reverse=True)
    seconds = [list(same) for _, same in itertools.groupby(newest_first, _second)]
    return [run for group in seconds for run in (sorted(group, key=created, reverse=True) if len(group) > 1 else group)]


def _second(run: Run) -> str:
    """Return the second of creation, from the name, or from run.json if a workflow chose the name."""
    return run.id[:_SECOND] if _TIMED.match(run.id) else f"{created(run):%Y%m%d-%H%M%S}"


def created(run: Run) -> datetime:
    """Return the time of creation."""
    try:
        return datetime.fromisoformat(run.read().created)
    except PipelineError:  # `pipe status` names it
        return datetime.fromtimestamp((run.path / "run.json").stat().st_mtime, UTC)


STEPS = ("check", "prepare", "train", "evaluate", "export", "package", "deploy")
CHECKED_FILES = "check.files"  # in a run: what make_files() wrote in check, until prepare takes it


class Acceptance(Frozen):
    """A person's decision that outputs stay current although parts of their key changed."""

    key: str
    parts: Mapping[str, str]
    changes: str
    by: str
    at: str


class StepRecord(Frozen):
    """The record of one step of one run."""

    step: str
    # `overridden`: rejected by the gate, and accepted by a person
    status: Literal["running", "done", "failed", "rejected", "overridden", "interrupted", "pruned"]
    key: str
    parts: Mapping[str, str]  # the named parts the key is made of
    argv: tuple[str, ...] = ()
    started: str = ""
    seconds: float = 0.0
    outputs: Mapping[str, str] = {}  # relative path → SHA-256
    digest: str = ""  # of outputs
    empty_folders: tuple[str, ...] = ()  # relative paths
    reused_from: str = ""  # run whose files these are
    reason: str = ""  # why it ran, was reused or failed
    accepted: tuple[Acceptance, ...] = ()  # the newest last
    owner: str = ""  # process of `pipe` that runs it: host, process number and start time
    checkpoints_key: str = ""  # key under which its checkpoints were begun, where changes were accepted since

    @property
    def complete(self) -> bool:
        """Return whether its outputs may be used, in this run and in others."""
        return self.status in ("done", "overridden")

    @property
    def current_status(self) -> str:
        """Return the status, or `died` for a step whose `pipe` is gone from this machine without recording its end."""
        return "died" if self.status == "running" and self.owner and not is_alive(self.owner) else self.status

    def is_current(self, key: str) -> bool:
        return key == self.key or any(key == acceptance.key for acceptance in self.accepted)

    @property
    def current_parts(self) -> Mapping[str, str]:
        """Return the parts that were last found or declared to be those of the outputs."""
        return self.accepted[-1].parts if self.accepted else self.parts


def own_identity() -> str:
    """Return what identifies this process, on all machines and for all time."""
    return _process_identity(os.getpid())


def is_alive(owner: str) -> bool:
    """Return whether a process lives, by its identity; of processes on other machines it is not known, and assumed."""
    host, pid, _ = owner.split()
    return host != socket.gethostname() or _process_identity(int(pid)) == owner


def _process_identity(pid: int) -> str:
    import psutil  # slow to load

    try:
        return f"{socket.gethostname()} {pid} {psutil.Process(pid).create_time()}"
    except psutil.NoSuchProcess:
        return ""


class RunFile(Frozen):
    """`run.json`."""

    SCHEMA: ClassVar[int] = 3

    schema_version: int = SCHEMA
    id: str
    created: str
    parent: str = ""  # the newest run when this one began, or the run that it deploys again
    wanted: tuple[str, ...]
    config: Mapping[str, object]
    continued: tuple[str, ...] = ()  # key=value overrides of resumes, on top of `config`
    starting_point: str = ""  # the checkpoint of another run from which it trains: run, step and digest
    environment: Mapping[str, str]
    study: str = ""  # of `pipe tune`, which made this run as one of its trials
    trial: int | None = None
    steps: Mapping[str, StepRecord] = {}
    seal: str = ""  # SHA-256 of everything else in this file


def sealed_text(body: RunFile, earlier: bytes | None) -> str:
    """Return what to write to run.json; if its earlier content was edited, the seal stays one that does not match."""
    if earlier is None or not _is_edited(earlier):
        body = body.model_copy(update={"seal": _seal(json.loads(body.model_dump_json()))})
    return body.model_dump_json(indent=2) + "\n"


def _is_edited(raw: bytes) -> bool:
    fields = json.loads(raw)
    return bool(fields.get("seal") != _seal(fields))


def _seal(fields: Mapping[str, object]) -> str:
    rest = {name: value for name, value in fields.items() if name != "seal"}
    return digest_bytes(json.dumps(rest, sort_keys=True).encode())


@dataclass(frozen=True)
class Run:
    path: Path

    @property
    def id(self) -> str:
        return self.path.name

    def output(self, step: str) -> Path:
        """Return the directory of a step's complete output."""
        return self.path / step

    def partial(self, step: str) -> Path:
        """Return the directory that a step writes to until it is complete."""
        return self.path / f"{step}.partial"

    def log(self, step: str) -> Path:
        return self.path / "logs" / f"{step}.log"

    @property
    def bundle_path(self) -> Path:
        return self.output("export") / "bundle"

    def bundle(self, trust: Trust | None = None) -> Bundle:
        """Return the bundle after verifying every file, and that it is the one that the export recorded."""
        bundle = open_bundle(self.bundle_path, trust)
        self._check_bundle(bundle.digest)
        return bundle

    def bundle_to_serve(self) -> Path:
        """Return the path of the bundle that the export recorded; its files are verified when it is opened."""
        manifest = self.bundle_path / "manifest.json"
        if not manifest.is_file():
            raise BundleError(f"run {self.id} has no bundle; `pipe run --resume {self.id}` continues it")
        self._check_bundle(digest_file(manifest))
        return self.bundle_path

    def require_bundle(self, digest: str) -> Bundle:
        """Return the bundle, which must be the one that was deployed or promoted under this digest."""
        bundle = self.bundle()
        if bundle.digest != digest:
            raise BundleError(
                f"run {self.id}: its bundle is {bundle.digest[:12]}, but the one that was deployed is {digest[:12]}; "
                "restore the files, or deploy another run with `pipe deploy RUN`"
            )
        return bundle

    def _check_bundle(self, digest: str) -> None:
        self.check_seal()
        record = self.read().steps.get("export")
        if record is None or not record.complete:
            raise BundleError(f"run {self.id}: has a bundle, but no record of its export; export it again")
        self.check_record(record)
        recorded = record.outputs.get("bundle/manifest.json", "")
        if recorded != digest:
            raise BundleError(
                f"run {self.id}: its bundle is {digest[:12]}, but the one that was exported is {recorded[:12]}; "
                f"restore the files, or `pipe run --resume {self.id}` exports again"
            )

    def check_seal(self) -> None:
        """Check that run.json is as `pipe` wrote it."""
        self.read()  # raises if it is damaged
        path = self.path / "run.json"
        if _is_edited(path.read_bytes()):
            raise BundleError(
                f"{path}: its settings, environment or records were edited since pipe wrote it; restore it from a "
                "copy, or move the run away: `pipe run all` makes a new one"
            )

    def check_record(self, record: StepRecord) -> None:
        if digest_mapping(record.outputs) != record.digest:
            raise BundleError(
                f"{self.path / 'run.json'}: the record of {record.step} was altered; restore it from a copy"
            )

    @property
    def runs(self) -> Path:
        return self.path.parent

    def read(self) -> RunFile:
        path = self.path / "run.json"
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            raise PipelineError(f"{self.path}: not a run directory (no run.json)") from None
        return RunFile.parse(raw, path, "restore it from a copy, or move the folder of the run away")

    @property
    def problem(self) -> str:
        """Return why run.json cannot be read, so that this run takes part in nothing; empty if it can."""
        try:
            self.read()
        except PipelineError as error:
            return str(error)
        return ""

    @cached_property
    def config(self) -> Config:
        """The configuration with the overrides of resumes."""
        body = self.read()
        return parse_config(body.config, str(self.path / "run.json"), body.continued)

    @cached_property
    def original_config(self) -> Config:
        """The configuration at the start of the run, which identifies its results."""
        return parse_config(self.read().config, source=str(self.path / "run.json"))

    def verdict(self) -> dict[str, object]:
        """Return the verdict of a complete evaluation."""
        return self.evaluation("verdict.json", "verdict")

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the model on the test set."""
        metrics: dict[str, float] = self.evaluation("metrics.json", "candidate")["candidate"]
        return metrics

    def evaluation(self, name: str, key: str) -> dict[str, Any]:
        """Return a file of the evaluation, which has this key."""
        path = self.output("evaluate") / name
        if not path.is_file():
            raise PipelineError(f"run {self.id} has no evaluation yet; `pipe run --resume {self.id}` continues it")
        body: dict[str, Any] = read_object(path)
        read_object(path, key)
        return body

    def override(self, verdict_digest: str) -> Override | None:
        """Return the override of exactly this verdict; an override of another verdict does not count."""
        override = read_override(self.path)
        return override if override is not None and override.verdict == verdict_digest else None


def run_of_bundle(path: Path) -> Run | None:
    """Return the run that a bundle's folder belongs to; None for a copy elsewhere."""
    folder = path.resolve()
    run = Run(folder.parent.parent)
    return run if run.bundle_path == folder and (run.path / "run.json").is_file() else None


# Outputs that no later step reads, or that are verified by what names them, as a manifest does its bundle.
_NOT_INPUTS = ("checkpoints/", "bundle/", "context/", "modelcar/")


def check_inputs(run: Run, step: str) -> None:
    """Check that what a step reads of earlier steps is as they recorded it, and as its own key names it."""
    records = run.read().steps
    if step not in records or not Rank.from_env().first:  # called without a plan, as by other processes of a step
        return
    parts = records[step].parts.items()
    inputs = {name.removeprefix("input:"): digest for name, digest in parts if name.startswith("input:")}
    recorded = {
        f"{upstream}/{name}": digest
        for upstream in {path.partition("/")[0] for path in inputs} & records.keys()
        for name, digest in records[upstream].outputs.items()
        if not name.startswith(_NOT_INPUTS)
    }
    for name, expected in sorted((recorded | inputs).items()):
        actual = digest_file(run.path / name) if (run.path / name).is_file() else "missing"
        if actual != expected:
            raise BundleError(
                f"{run.path / name}: changed since it was recorded (recorded {expected[:12]}, found {actual[:12]}); "
                f"`pipe run --resume {run.id}` makes it again"
            )


def step_main(name: str, work: Callable[[Run, Path], None], argv: Sequence[str]) -> int:
    """Call `work(run, root)`, where root is the project; write an error to a file for the runner, and print it."""
    parser = argparse.ArgumentParser(prog=name, description=f"the {name} step of one run")
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--root", type=Path, default=Path(), help="project folder with task.py (default: here)")
    options = parser.parse_args(argv)
    watch_parent()
    _quiet_libraries(name)
    run, root = Run(options.run.resolve()), options.root.resolve()
    try:
        make_partial(run, name)
        if (run.path / "run.json").is_file():
            check_inputs(run, name)
        work(run, root)
    except PipelineError as error:
        with contextlib.suppress(PermissionError):  # which may be the error itself; then only the log has it
            write_error(error, run.partial(name))
        print(f"{'echo' if error.echo else 'error'}: {error}", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        traceback.print_exc()
        unexpected = _unexpected_error(error, root, run)
        write_error(unexpected, run.partial(name))
        return unexpected.exit_code
    return 0


def _quiet_libraries(step: str) -> None:
    """Keep from the log what libraries repeat in every step, and the escape codes of the rest."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it recommends another package for its CPU kernels
    needed = ("MISMATCH", "CONVERSION", *(("MISSING",) if step == "check" else ()))

    def is_needed(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        record.msg, record.args = re.sub(r"\x1b\[[\d;]*m", "", text), ()
        return "LOAD REPORT" not in text or any(word in text for word in needed)

    logging.getLogger("transformers.modeling_utils").addFilter(is_needed)


def make_partial(run: Run, step: str) -> None:
    """Create the folder that a step writes to, or raise an error that names the users who disagree."""
    folder = run.partial(step)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except PermissionError as error:
        raise _not_writable(run.path) from error
    for path in (folder, run.path):
        if not os.access(path, os.W_OK | os.X_OK):
            raise _not_writable(path)


def _not_writable(folder: Path) -> ResourceError:
    owner = folder.stat()
    return ResourceError(
        f"cannot write to {folder}: this process is user {os.geteuid()}, and the folder belongs to user "
        f"{owner.st_uid} and group {owner.st_gid} with mode {stat.S_IMODE(owner.st_mode):04o}; to fix it: give the "
        "folder to this user, or on a cluster see docs/kubernetes-training.md, Users of the volume"
    )


def _unexpected_error(error: Exception, root: Path, run: Run) -> PipelineError:
    """Return the error to print for an unexpected exception; its traceback is in the log."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return disk_full(run.path, f"`pipe run --resume {run.id}`")
    if (missing := missing_extra(error)) is not None:
        return missing
    rank = f"rank {Rank.from_env().rank}: " if Rank.from_env().world_size > 1 else ""
    return StageError(f"{rank}{describe(error, root)}")


_INPUT_ENDED = "EOF when reading a line"  # what input() raises


def describe(error: BaseException, root: Path) -> str:
    """Describe an exception in one line, with the line of the user's code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    own_frames = [frame for frame in frames if Path(frame.filename).is_relative_to(root)]
    location = f" ({Path(own_frames[-1].filename).name}, line {own_frames[-1].lineno})" if own_frames else ""
    text = " ".join(str(error).split())[:400]
    if type(error).__name__ == "BdbQuit" or text == _INPUT_ENDED:
        text = "the standard input of a step is empty; to fix it: remove the call of input() or of the debugger"
    return f"{type(error).__name__}: {text}{location}"
