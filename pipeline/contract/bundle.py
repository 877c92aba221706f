"""Bundles: self-contained model directories, verified against a manifest with the digest of every file and ancestor.

`provenance.json` is an in-toto statement of the bundle's origin in the terms of SLSA. A bundle must not have hard
links from outside the runs, nor weights outside its directory: the locations of external data are parsed from the
bytes of the ONNX file, because the service has no library for it. An overridden verdict has an `override.json`.
"""

from __future__ import annotations

import json
import mmap
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from pipeline.contract.settings.section import Frozen
from pipeline.contract.signature import Signature
from pipeline.contract.signing import Trust, check_cover
from pipeline.system.errors import BundleError, GateError
from pipeline.system.files import digest_bytes, digest_file, empty_folders, write_json

if TYPE_CHECKING:
    from pipeline.contract.golden import Golden, GoldenRequest

PROVENANCE = "provenance.json"
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
BUILDER = "pkg:pypi/pipe-road"


def statement(
    manifest: Manifest,
    raw: bytes,
    parameters: Mapping[str, Any],
    packages: Mapping[str, str],
    builder: Mapping[str, str],
) -> dict[str, Any]:
    """Return the statement, without times and names of machines or runs, so that equal bundles have equal statements.

    `parameters` is the configuration, `packages` the versions that affect the model, `builder` our own versions.
    """
    ancestors = manifest.ancestors.model_dump(exclude={"onnx"})  # it is a subject
    sources = [{"name": name, "digest": {"sha256": digest}} for name, digest in ancestors.items()]
    tools = [{"name": name, "uri": f"pkg:pypi/{name}@{version}"} for name, version in sorted(packages.items())]
    return {
        "_type": STATEMENT,
        "subject": _subjects(manifest, raw),
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": f"{BUILDER}#export",
                "externalParameters": {"config": dict(parameters)},
                "internalParameters": {},
                "resolvedDependencies": [*sources, *tools],
            },
            "runDetails": {"builder": {"id": f"{BUILDER}#pipe", "version": dict(builder)}},
        },
    }


def check_provenance(directory: Path, manifest: Manifest, raw: bytes) -> None:
    """Check that the statement, if there is one, is about this bundle."""
    path = directory / PROVENANCE
    if not path.is_file():
        return
    try:
        provenance = json.loads(path.read_bytes())
    except ValueError as error:
        raise BundleError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(provenance, dict) or (provenance.get("_type"), provenance.get("predicateType")) != (
        STATEMENT,
        PREDICATE,
    ):
        raise BundleError(f"{path}: is not an in-toto statement of SLSA provenance; export again")
    if provenance.get("subject") != _subjects(manifest, raw):
        raise BundleError(f"{path}: is about another bundle; export again")


def _subjects(manifest: Manifest, raw: bytes) -> list[dict[str, Any]]:
    digests = {"manifest.json": digest_bytes(raw), **{name: entry.sha256 for name, entry in manifest.files.items()}}
    return [{"name": name, "digest": {"sha256": digest}} for name, digest in sorted(digests.items())]


def check_hard_links(path: Path, status: os.stat_result) -> None:
    """Reject a file with hard links outside the runs that reuse it, unless the file system is read-only."""
    if status.st_nlink == 1 or os.statvfs(path).f_flag & os.ST_RDONLY:
        return
    unexplained = status.st_nlink - sum(1 for _ in _shared(path, status))
    if unexplained > 0:
        raise BundleError(
            f"{path}: has {unexplained} hard link{'s' * (unexplained > 1)} elsewhere, by which it can be changed; copy "
            "the bundle with `cp -r` and use the copy"
        )


def _shared(path: Path, status: os.stat_result) -> Iterator[Path]:
    """Yield the file and its hard links in other runs of the folder: `pipe` links what it reuses."""
    absolute = path.absolute()
    run = next((parent for parent in absolute.parents if (parent / "run.json").is_file()), None)
    if run is None:
        yield path
        return
    step, *remainder = absolute.relative_to(run).parts
    steps = {step.removesuffix(".partial"), step.removesuffix(".partial") + ".partial"}
    for other in run.parent.iterdir():
        for name in steps:
            candidate = other.joinpath(name, *remainder)
            try:
                is_link = os.path.samestat(candidate.lstat(), status)
            except OSError:  # not there
                continue
            if is_link:
                yield candidate


# ONNX's protobuf messages that lead to a tensor: field number → message type.
MESSAGES: dict[str, dict[int, str]] = {
    "ModelProto": {7: "GraphProto", 20: "TrainingInfoProto", 25: "FunctionProto"},
    "TrainingInfoProto": {1: "GraphProto", 2: "GraphProto"},
    "GraphProto": {1: "NodeProto", 5: "TensorProto", 15: "SparseTensorProto"},
    "FunctionProto": {7: "NodeProto", 11: "AttributeProto"},
    "NodeProto": {5: "AttributeProto"},
    "AttributeProto": {
        5: "TensorProto", 6: "GraphProto", 10: "TensorProto", 11: "GraphProto", 22: "SparseTensorProto",
        23: "SparseTensorProto",
    },
    "SparseTensorProto": {1: "TensorProto", 2: "TensorProto"},
    "TensorProto": {13: "StringStringEntryProto"},
}  # fmt: skip

_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5
_SPARE = {_EIGHT: 8, _FOUR: 4}
_LOCATION = b"location"

Span: TypeAlias = tuple[int, int]


def external_locations(path: Path) -> set[str]:
    """Return the locations of external data in an ONNX file, as written there."""
    if not path.stat().st_size:
        return set()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as raw:
        if raw.find(_LOCATION) < 0:  # the key of every location
            return set()
        try:
            return set(_locations(raw))
        except (IndexError, UnicodeDecodeError) as error:
            raise BundleError(f"{path}: is not a readable ONNX file") from error


def check_external_data_files(path: Path) -> None:
    """Check that external data is in regular files next to the ONNX file."""
    for location in sorted(external_locations(path)):
        target = path.parent / location
        if not location or Path(location).name != location or target.is_symlink() or not target.is_file():
            raise BundleError(f"{path}: keeps weights in {location!r}, which is not a regular file next to it")


def _locations(raw: mmap.mmap) -> Iterator[str]:
    """Search without recursion: a malicious file can be nested at any depth."""
    pending: list[tuple[str, Span]] = [("ModelProto", (0, len(raw)))]
    while pending:
        kind, span = pending.pop()
        if kind == "StringStringEntryProto":
            entry = {number: raw[slice(*inner)] for number, inner in _fields(raw, span)}
            if entry.get(1) == _LOCATION:
                yield entry.get(2, b"").decode()
            continue
        field_kinds = MESSAGES[kind]
        pending += [(field_kinds[number], inner) for number, inner in _fields(raw, span) if number in field_kinds]


def _fields(raw: mmap.mmap, span: Span) -> Iterator[tuple[int, Span]]:
    """Yield number and span of each length-delimited field; skip the others."""
    position, limit = span
    while position < limit:
        tag, position = _varint(raw, position)
        kind = tag & 7
        if kind == _BYTES:
            size, position = _varint(raw, position)
            if position + size > limit:
                raise IndexError(position)
            yield tag >> 3, (position, position + size)
            position += size
        elif kind == _VARINT:
            _, position = _varint(raw, position)
        elif kind in _SPARE:
            position += _SPARE[kind]
        else:
            raise IndexError(position)
    if position != limit:
        raise IndexError(position)


def _varint(raw: mmap.mmap, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError(at)


# Files that the manifest does not name: itself, its signature, and the provenance.
BESIDE = ("manifest.json", "manifest.sig.json", "provenance.json")
PROBE_ID = "probe"  # x-request-id of golden requests to a live service: they are no traffic, so none is sampled
REQUIRED = ("model.onnx", "signature.json", "golden.npz", "golden.json", "card.md")
OVERRIDE_FILE = "override.json"  # of a run, and of the bundle made of it
OVERRIDDEN = "overridden"  # the verdict in the manifest of such a bundle, and the status of such an evaluation
NOT_EVALUATED = "not evaluated: no labelled data"  # the verdict where the task has no metrics()


class Override(Frozen):
    """Who let a model with a failed verdict pass, when, why, and exactly which verdict. Run and bundle contain it."""

    at: str
    by: str
    reason: str
    verdict: str  # SHA-256 of the verdict.json it is about

    def __str__(self) -> str:
        return f"overridden by {self.by}, {self.at}: {self.reason}"


def read_override(directory: Path) -> Override | None:
    """Return the override in the directory of a run or a bundle, whichever verdict it is about."""
    path = directory / OVERRIDE_FILE
    return Override.parse(path.read_bytes(), path, "`pipe gate override` writes it") if path.is_file() else None


def write_override(directory: Path, override: Override) -> None:
    write_json(directory / OVERRIDE_FILE, override.model_dump())


def passed_gate(verdict: str) -> bool:
    """Return whether a model with this verdict may be deployed."""
    return verdict in ("pass", "no-baseline", OVERRIDDEN)


def check_gate(verdict: str, owner: str) -> None:
    """Raise unless a model with this verdict may be deployed."""
    if not passed_gate(verdict):
        raise GateError(
            f"{owner}: the gate's verdict is {verdict!r}; only pass, no-baseline or overridden is deployed; "
            "`pipe gate override RUN --reason WHY` and `pipe run all` override a verdict"
        )


class FileEntry(Frozen):
    sha256: str
    bytes: int


class Ancestors(Frozen):
    """Digests of what the model was made from; each was checked when the next was made."""

    code: str
    data: str
    checkpoint: str
    verdict: str
    onnx: str
    override: str = ""  # of override.json, if a person has overridden a failed verdict
    test_set: str = ""  # fingerprint of the samples that the verdict is about


class Manifest(Frozen):
    SCHEMA: ClassVar[int] = 1

    schema_version: int
    name: str
    verdict: str  # pass, no-baseline, overridden or NOT_EVALUATED
    ancestors: Ancestors
    files: Mapping[str, FileEntry]


@dataclass(frozen=True)
class Bundle:
    """A verified bundle."""

    path: Path
    digest: str  # SHA-256 of manifest.json, and so of all files
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
        from pipeline.contract.golden import Golden  # numpy is slow to load, and most commands need no arrays

        return Golden.read(self.path)

    def golden_requests(self, version: str = "") -> list[GoldenRequest]:
        """Return its golden requests as HTTP; `version` names one of several that the service has loaded."""
        from pipeline.contract.golden import golden_requests

        name = f"{self.name}/versions/{version}" if version else self.name
        return list(golden_requests(self.golden(), name, self.signature.inputs))


def write_manifest(directory: Path, name: str, verdict: str, ancestors: Ancestors) -> str:
    """Write the manifest of all files in a directory; return the bundle digest."""
    files = {
        path.relative_to(directory).as_posix(): FileEntry(sha256=digest_file(path), bytes=path.stat().st_size)
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.relative_to(directory).as_posix() not in BESIDE
    }
    manifest = Manifest(schema_version=Manifest.SCHEMA, name=name, verdict=verdict, ancestors=ancestors, files=files)
    write_json(directory / "manifest.json", manifest.model_dump())
    return digest_file(directory / "manifest.json")


def open_bundle(directory: Path, trust: Trust | None = None) -> Bundle:
    """Open a bundle after verifying every file; missing, changed, added or linked files are errors.

    With `trust`, the signature is checked first.
    """
    path = directory / "manifest.json"
    if not path.is_file():
        raise BundleError(f"{directory}: not a bundle (no manifest.json)")
    raw = path.read_bytes()
    check_cover(directory, raw)
    if trust is not None:
        trust.check(directory, raw)
    manifest = Manifest.parse(raw, path, "export again", BundleError)
    if manifest.schema_version != Manifest.SCHEMA:
        raise BundleError(
            f"{path}: schema {manifest.schema_version}, this version reads {Manifest.SCHEMA}; export again"
        )
    _check_names(directory, manifest)
    for name, entry in manifest.files.items():
        if (digest := digest_file(directory / name)) != entry.sha256:
            raise BundleError(
                f"{directory / name}: content changed since export (expected {entry.sha256[:12]}, found {digest[:12]})"
            )
    if manifest.files["model.onnx"].sha256 != manifest.ancestors.onnx:
        raise BundleError(f"{path}: the lineage names another model.onnx than the file list")
    check_external_data_files(directory / "model.onnx")
    check_provenance(directory, manifest, raw)
    signature = _read_signature(directory)
    if signature.codec and signature.codec_file not in manifest.files:
        raise BundleError(f"{directory}: missing {signature.codec_file}")
    return Bundle(directory, digest_bytes(raw), manifest, signature, _override(directory, manifest))


def _override(directory: Path, manifest: Manifest) -> Override | None:
    """Return the override, which a failed verdict needs, after checking that it is about this verdict."""
    override, ancestors = read_override(directory), manifest.ancestors
    if override is None and manifest.verdict != OVERRIDDEN and not ancestors.override:
        return None
    entry = manifest.files.get(OVERRIDE_FILE)
    if override is None or manifest.verdict != OVERRIDDEN or entry is None or entry.sha256 != ancestors.override:
        raise BundleError(f"{directory}: verdict {manifest.verdict!r} and {OVERRIDE_FILE} do not match")
    if override.verdict != ancestors.verdict:
        raise BundleError(f"{directory / OVERRIDE_FILE}: about another verdict than the one in the lineage")
    return override


def _check_names(directory: Path, manifest: Manifest) -> None:
    """Check that the directory has exactly the named files, and only regular files."""
    for path in directory.rglob("*"):
        status = path.lstat()
        mode = status.st_mode
        if stat.S_ISLNK(mode):
            raise BundleError(f"{path}: a symbolic link; a bundle has regular files only")
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise BundleError(f"{path}: not a regular file")
        if stat.S_ISREG(mode):
            check_hard_links(path, status)
    file_names = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
    file_names -= set(BESIDE)
    manifest_names = set(manifest.files)
    if missing := sorted((manifest_names | set(REQUIRED)) - file_names):
        raise BundleError(f"{directory}: missing {', '.join(missing)}")
    if unlisted := sorted((set(REQUIRED) | file_names) - manifest_names):
        raise BundleError(f"{directory}: not in the manifest: {', '.join(unlisted)}")
    if empty := empty_folders(directory):
        raise BundleError(f"{directory}: not in the manifest: {', '.join(empty)}, an empty folder")


def _read_signature(directory: Path) -> Signature:
    path = directory / "signature.json"
    return Signature.parse(path.read_bytes(), path, "export again", BundleError)
