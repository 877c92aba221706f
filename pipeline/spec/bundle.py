"""The bundle: a self-contained model directory whose manifest names every byte and every ancestor."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from pipeline.spec.digest import digest_bytes, digest_file
from pipeline.spec.errors import BundleError
from pipeline.spec.external import check_inside
from pipeline.spec.files import write_json
from pipeline.spec.frozen import Frozen
from pipeline.spec.golden import Golden
from pipeline.spec.links import check_own
from pipeline.spec.override import FILE as OVERRIDE_FILE
from pipeline.spec.override import OVERRIDDEN, Override, read_override
from pipeline.spec.provenance import check_provenance
from pipeline.spec.signature import Signature
from pipeline.spec.signing import Trust, check_cover

SCHEMA = 1
# Beside what the manifest names: itself, a signature over it, and the statement of where the bundle came from.
BESIDE = ("manifest.json", "manifest.sig.json", "provenance.json")
REQUIRED = ("model.onnx", "signature.json", "golden.npz", "golden.json", "card.md")


class FileEntry(Frozen):
    sha256: str
    bytes: int


class Ancestors(Frozen):
    """Digests of what the model came from; each link was checked when the next was made."""

    code: str
    data: str
    checkpoint: str
    verdict: str
    onnx: str
    override: str = ""  # of override.json, where a person let a failed verdict pass


class Manifest(Frozen):
    schema_version: int
    name: str
    verdict: str  # pass, no-baseline or overridden
    ancestors: Ancestors
    files: Mapping[str, FileEntry]


@dataclass(frozen=True)
class Bundle:
    """A verified bundle."""

    path: Path
    digest: str  # SHA-256 of manifest.json, and so of everything
    manifest: Manifest
    signature: Signature
    override: Override | None = None

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def model(self) -> Path:
        return self.path / "model.onnx"

    def golden(self) -> Golden:
        return Golden.read(self.path)


def write_manifest(directory: Path, name: str, verdict: str, ancestors: Ancestors) -> str:
    """Seal a directory: name every file in it. Returns the bundle digest."""
    files = {
        path.relative_to(directory).as_posix(): FileEntry(sha256=digest_file(path), bytes=path.stat().st_size)
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.relative_to(directory).as_posix() not in BESIDE
    }
    manifest = Manifest(schema_version=SCHEMA, name=name, verdict=verdict, ancestors=ancestors, files=files)
    write_json(directory / "manifest.json", manifest.model_dump())
    return digest_file(directory / "manifest.json")


def open_bundle(directory: Path, trust: Trust | None = None) -> Bundle:
    """Verify every byte against the manifest; anything missing, changed, added or linked is refused.

    With `trust` its signature comes first: nothing of an unsigned bundle is looked at.
    """
    path = directory / "manifest.json"
    if not path.is_file():
        raise BundleError(f"{directory}: not a bundle (no manifest.json)")
    raw = path.read_bytes()
    check_cover(directory, raw)
    if trust is not None:
        trust.check(directory, raw)
    try:
        manifest = Manifest.model_validate_json(raw)
    except ValidationError as error:
        raise BundleError(f"{path}: not a valid manifest: {error.errors()[0]['msg']}") from error
    if manifest.schema_version != SCHEMA:
        raise BundleError(f"{path}: schema {manifest.schema_version}, this version reads {SCHEMA}; export again")
    _check_names(directory, manifest)
    for name, entry in manifest.files.items():
        if (found := digest_file(directory / name)) != entry.sha256:
            raise BundleError(
                f"{directory / name}: content changed since export "
                f"(manifest says {entry.sha256[:12]}, found {found[:12]})"
            )
    if manifest.files["model.onnx"].sha256 != manifest.ancestors.onnx:
        raise BundleError(f"{path}: the lineage names another model.onnx than the file list")
    check_inside(directory / "model.onnx")
    check_provenance(directory, manifest, raw)
    signature = _read_signature(directory)
    if signature.codec and "codec.py" not in manifest.files:
        raise BundleError(f"{directory}: missing codec.py")
    return Bundle(directory, digest_bytes(raw), manifest, signature, _override(directory, manifest))


def _override(directory: Path, manifest: Manifest) -> Override | None:
    """A failed verdict goes nowhere without the word that let it pass, and that is about this very verdict."""
    found, ancestors = read_override(directory), manifest.ancestors
    if found is None and manifest.verdict != OVERRIDDEN and not ancestors.override:
        return None
    named = manifest.files.get(OVERRIDE_FILE)
    if found is None or manifest.verdict != OVERRIDDEN or named is None or named.sha256 != ancestors.override:
        raise BundleError(f"{directory}: verdict {manifest.verdict!r} and {OVERRIDE_FILE} do not belong together")
    if found.verdict != ancestors.verdict:
        raise BundleError(f"{directory / OVERRIDE_FILE}: about another verdict than the one in the lineage")
    return found


def _check_names(directory: Path, manifest: Manifest) -> None:
    """The files on disk are exactly those named, plain files all."""
    for path in directory.rglob("*"):
        found_there = path.lstat()
        mode = found_there.st_mode
        if stat.S_ISLNK(mode):
            raise BundleError(f"{path}: a symbolic link; a bundle holds plain files only")
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise BundleError(f"{path}: not a plain file")
        if stat.S_ISREG(mode):
            check_own(path, found_there)
    found = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
    found -= set(BESIDE)
    named = set(manifest.files)
    if missing := sorted((named | set(REQUIRED)) - found):
        raise BundleError(f"{directory}: missing {', '.join(missing)}")
    if unlisted := sorted((set(REQUIRED) | found) - named):
        raise BundleError(f"{directory}: not in the manifest: {', '.join(unlisted)}")


def _read_signature(directory: Path) -> Signature:
    path = directory / "signature.json"
    try:
        return Signature.model_validate(json.loads(path.read_text()))
    except (ValidationError, json.JSONDecodeError) as error:
        raise BundleError(f"{path}: not a valid signature: {error}") from error
