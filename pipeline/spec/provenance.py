"""`provenance.json`: an in-toto statement of where a bundle came from, in the words of SLSA; the same for the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.spec.digest import digest_bytes
from pipeline.spec.errors import BundleError

if TYPE_CHECKING:
    from pipeline.spec.bundle import Manifest

PROVENANCE = "provenance.json"
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"

_BUILDER = "pkg:pypi/pipe-road"


def statement(
    manifest: Manifest,
    raw: bytes,
    parameters: Mapping[str, Any],
    packages: Mapping[str, str],
    builder: Mapping[str, str],
) -> dict[str, Any]:
    """No clock and no name of a machine or a run: who makes the same bundle again gets the same statement.

    `parameters` is the configuration, `packages` what worked on the model, `builder` our own versions.
    """
    ancestors = manifest.ancestors.model_dump(exclude={"onnx"})  # that one is a subject
    came_from = [{"name": name, "digest": {"sha256": digest}} for name, digest in ancestors.items()]
    tools = [{"name": name, "uri": f"pkg:pypi/{name}@{version}"} for name, version in sorted(packages.items())]
    return {
        "_type": STATEMENT,
        "subject": _subjects(manifest, raw),
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": f"{_BUILDER}#export",
                "externalParameters": {"config": dict(parameters)},
                "internalParameters": {},
                "resolvedDependencies": [*came_from, *tools],
            },
            "runDetails": {"builder": {"id": f"{_BUILDER}#pipe", "version": dict(builder)}},
        },
    }


def check_provenance(directory: Path, manifest: Manifest, raw: bytes) -> None:
    """A statement that is there is about this very bundle."""
    path = directory / PROVENANCE
    if not path.is_file():
        return
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise BundleError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(found, dict) or (found.get("_type"), found.get("predicateType")) != (STATEMENT, PREDICATE):
        raise BundleError(f"{path}: is no in-toto statement of SLSA provenance; export again")
    if found.get("subject") != _subjects(manifest, raw):
        raise BundleError(f"{path}: is about another bundle; export again")


def _subjects(manifest: Manifest, raw: bytes) -> list[dict[str, Any]]:
    digests = {"manifest.json": digest_bytes(raw), **{name: entry.sha256 for name, entry in manifest.files.items()}}
    return [{"name": name, "digest": {"sha256": digest}} for name, digest in sorted(digests.items())]
