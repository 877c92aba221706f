"""Going past a failed verdict, on record: written beside the run, honoured wherever the same verdict is reached.

Signing a bundle where it lies: alone in a folder, or in a run, whose record then knows the signature.
"""

from __future__ import annotations

import getpass
import os
import shutil
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.contract.bundle import Bundle, open_bundle
from pipeline.contract.errors import BundleError, ConfigError
from pipeline.contract.files import digest_file, digest_mapping
from pipeline.contract.override import OVERRIDDEN, OVERRIDE_FILE, Override, write_override
from pipeline.contract.run import Run, StepRecord
from pipeline.contract.signing import SIGNATURE, sign
from pipeline.history import changed_outputs, now, write_record

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


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
    given = run.path / OVERRIDE_FILE
    with_it = record.status == OVERRIDDEN and given.is_file()
    return {**record.outputs, **({OVERRIDE_FILE: digest_file(given)} if with_it else {})}


def carry(source: Run, target: Run) -> None:
    """The outputs of an overridden evaluation are shared with what they rest on."""
    if (source.path / OVERRIDE_FILE).is_file():
        shutil.copyfile(source.path / OVERRIDE_FILE, target.path / OVERRIDE_FILE)


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


def sign_bundle(path: Path, key: Ed25519PrivateKey) -> tuple[Bundle, str]:
    """Nobody signs what is damaged; a signature that was there gives way."""
    (path / SIGNATURE).unlink(missing_ok=True)
    return open_bundle(path), sign(path, key)


def sign_run(run: Run, key: Ed25519PrivateKey) -> tuple[Bundle, str]:
    """Later runs that reuse the export take the signature along, and `package` makes an image that holds it."""
    record = run.read().steps.get("export")
    if record is None or record.status != "done":
        raise ConfigError(f"run {run.id} has no bundle; `pipe run --resume {run.id}` goes on to one")
    signed = sign_bundle(run.bundle_path, key)
    name = f"bundle/{SIGNATURE}"
    outputs = {**record.outputs, name: digest_file(run.output("export") / name)}
    write_record(run, record.model_copy(update={"outputs": outputs, "digest": digest_mapping(outputs)}))
    return signed
