"""Change what is recorded of a run afterwards: override its rejected verdict, or sign its bundle."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.contract.bundle import (
    NOT_EVALUATED,
    OVERRIDDEN,
    OVERRIDE_FILE,
    Bundle,
    Override,
    open_bundle,
    write_override,
)
from pipeline.contract.registry import current_user
from pipeline.contract.run import Run, StepRecord
from pipeline.contract.signing import SIGNATURE, read_envelope, sign
from pipeline.history import changed_outputs, now, write_record
from pipeline.system.errors import BundleError, ConfigError
from pipeline.system.files import digest_file, digest_mapping

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


def override_verdict(run: Run, reason: str) -> Override:
    """Let a rejected run continue; its verdict stays as it is."""
    if not reason.strip():
        raise ConfigError("--reason is empty; write why this model may pass, it is recorded permanently")
    record = _rejected_record(run)
    if changed := changed_outputs(run, record):
        raise BundleError(
            f"run {run.id}: evaluate/{changed[0]} changed on disk; `pipe run --resume {run.id}` evaluates again"
        )
    override = Override(at=now(), by=current_user(), reason=" ".join(reason.split()), verdict=verdict_digest(run))
    write_override(run.path, override)
    write_record(run, record.model_copy(update={"status": OVERRIDDEN}))  # last: killed before, it can be repeated
    return override


def _rejected_record(run: Run) -> StepRecord:
    record = run.read().steps.get("evaluate")
    if record is None or not (run.output("evaluate") / "verdict.json").is_file():
        raise ConfigError(f"run {run.id} has no verdict yet; `pipe run --resume {run.id}` continues it")
    if record.status == OVERRIDDEN:
        raise ConfigError(f"run {run.id} is {run.override(verdict_digest(run))}; an override cannot be changed")
    verdict = run.verdict()["verdict"]
    if (record.status, verdict) not in (("rejected", "fail"), ("done", NOT_EVALUATED)):
        raise ConfigError(f"run {run.id} was not rejected, its verdict is `{verdict}`; there is nothing to override")
    return record


def verdict_digest(run: Run) -> str:
    return digest_file(run.output("evaluate") / "verdict.json")


def outputs_with_override(run: Run, record: StepRecord) -> dict[str, str]:
    """Return the digests of a step's files and of the override, which later steps depend on as well."""
    override = run.path / OVERRIDE_FILE
    if record.status == OVERRIDDEN and override.is_file():
        return {**record.outputs, OVERRIDE_FILE: digest_file(override)}
    return dict(record.outputs)


def copy_override(source: Run, target: Run) -> None:
    if (source.path / OVERRIDE_FILE).is_file():
        shutil.copyfile(source.path / OVERRIDE_FILE, target.path / OVERRIDE_FILE)


def reuse_override(run: Run, others: Iterable[Run]) -> Override | None:
    """Return the override of the same verdict, byte for byte, in this run or another one."""
    digest = verdict_digest(run)
    for other in (run, *others):
        override = other.override(digest)
        if override is not None:
            if other.path != run.path:
                copy_override(other, run)
            return override
    return None


def sign_bundle(path: Path, key: Ed25519PrivateKey) -> tuple[Bundle, str]:
    """Check a bundle and sign it, beside the signatures of other keys; those of a bundle that changed since go."""
    earlier = read_envelope(path)
    (path / SIGNATURE).unlink(missing_ok=True)
    return open_bundle(path), sign(path, key, earlier)


def sign_run(run: Run, key: Ed25519PrivateKey) -> tuple[Bundle, str]:
    """Sign the bundle of a run and record it, so that later runs reuse the signature and images contain it."""
    record = run.read().steps.get("export")
    if record is None or record.status != "done":
        raise ConfigError(f"run {run.id} has no bundle; `pipe run --resume {run.id}` continues it")
    signed = sign_bundle(run.bundle_to_serve(), key)
    name = f"bundle/{SIGNATURE}"
    outputs = {**record.outputs, name: digest_file(run.output("export") / name)}
    write_record(run, record.model_copy(update={"outputs": outputs, "digest": digest_mapping(outputs)}))
    return signed
