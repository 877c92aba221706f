"""Going past a failed verdict, on record: written beside the run, honoured wherever the same verdict is reached."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
from collections.abc import Iterable

from pipeline.history import changed_outputs, now, write_record
from pipeline.spec.digest import digest_file
from pipeline.spec.errors import BundleError, ConfigError
from pipeline.spec.override import FILE, OVERRIDDEN, Override, write_override
from pipeline.spec.run import Run, StepRecord


def override(run: Run, reason: str) -> Override:
    """The run's failed verdict does not hold it up any more; the verdict itself stays as it is."""
    if not reason.strip():
        raise ConfigError("--reason is empty; say why this model shall go on, it is on record for ever")
    record = _rejected(run)
    if changed := changed_outputs(run, record):
        raise BundleError(
            f"run {run.id}: evaluate/{changed[0]} changed on disk since it was judged; `pipe run --resume {run.id}` "
            "judges again"
        )
    found = Override(at=now(), by=_who(), reason=" ".join(reason.split()), verdict=verdict_digest(run))
    write_override(run.path, found)
    write_record(run, record.model_copy(update={"status": OVERRIDDEN}))  # killed before: asked again, it is rejected
    return found


def verdict_digest(run: Run) -> str:
    return digest_file(run.output("evaluate") / "verdict.json")


def outputs_of(run: Run, record: StepRecord) -> dict[str, str]:
    """Digests of a step's files, and of the word that lets them pass: later steps are made of both."""
    given = run.path / FILE
    with_it = record.status == OVERRIDDEN and given.is_file()
    return {**record.outputs, **({FILE: digest_file(given)} if with_it else {})}


def carry(source: Run, target: Run) -> None:
    """The outputs of an overridden evaluation are shared with what they rest on."""
    if (source.path / FILE).is_file():
        shutil.copyfile(source.path / FILE, target.path / FILE)


def adopt(run: Run, others: Iterable[Run]) -> Override | None:
    """The run was rejected just now: the same verdict, byte for byte, may have been overridden before."""
    digest = verdict_digest(run)
    for other in (run, *others):
        found = other.override(digest)
        if found is not None:
            if other.path != run.path:
                carry(other, run)
            return found
    return None


def _rejected(run: Run) -> StepRecord:
    record = run.read().steps.get("evaluate")
    if record is None or not (run.output("evaluate") / "verdict.json").is_file():
        raise ConfigError(f"run {run.id} has no verdict yet; `pipe run --resume {run.id}` goes on to one")
    if record.status == OVERRIDDEN:
        raise ConfigError(f"run {run.id} is {run.override(verdict_digest(run))}; a word that was given stays")
    verdict = run.verdict()["verdict"]
    if record.status != "rejected" or verdict != "fail":
        raise ConfigError(f"run {run.id} was not rejected, its verdict is `{verdict}`; there is nothing to override")
    return record


def _who() -> str:
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        name = f"uid {os.getuid()}"
    return f"{name}@{socket.gethostname()}"
