"""Signing a bundle where it lies: alone in a folder, or in a run, whose record then knows the signature."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.history import write_record
from pipeline.spec.bundle import Bundle, open_bundle
from pipeline.spec.digest import digest_file, digest_mapping
from pipeline.spec.errors import ConfigError
from pipeline.spec.run import Run
from pipeline.spec.signing import SIGNATURE, sign

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


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
