"""The bill of materials of an image, in CycloneDX: what is installed, and every file of the bundle with its digest."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

from k8s.inventory import Package
from pipeline.spec.bundle import Bundle
from pipeline.spec.digest import digest_mapping

_SCHEMA = "http://cyclonedx.org/schema/bom-1.6.schema.json"
_MODEL = re.compile(r"\.(onnx|data)$")
_DISTRIBUTORS = {"deb": "debian", "apk": "alpine"}


def document(subject: Mapping[str, str], installed: Iterable[Package], bundle: Bundle | None) -> dict[str, Any]:
    """The same for the same content: its number is made of what it lists, and it bears no date."""
    components = [_package(package) for package in installed] + (_files(bundle) if bundle else [])
    root = {
        "type": "container",
        "bom-ref": "image",
        "name": subject["name"],
        "version": subject["version"],
        "properties": [{"name": f"pipe-road:{key}", "value": value} for key, value in sorted(subject.items())],
    }
    refs = [component["bom-ref"] for component in components]
    number = digest_mapping({**subject, **dict.fromkeys(refs, "")})
    return {
        "$schema": _SCHEMA,
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, number)}",
        "version": 1,
        "metadata": {"component": root, "tools": {"components": [{"type": "application", "name": "pipe-road"}]}},
        "components": components,
        "dependencies": [{"ref": "image", "dependsOn": refs}],
    }


def pinned(requirements: Iterable[str]) -> list[Package]:
    """Where no image was built: what one would be made of."""
    pairs = (re.match(r"([\w.\-]+)(?:\[[^\]]*\])?==([^,;\s]+)", line) for line in requirements)
    return [Package("pypi", pair[1], pair[2]) for pair in pairs if pair]


def package_url(package: Package) -> str:
    name = package.name.lower().replace("_", "-") if package.kind == "pypi" else package.name
    distributor = f"{_DISTRIBUTORS[package.kind]}/" if package.kind in _DISTRIBUTORS else ""
    qualifier = f"?arch={quote(package.architecture, safe='')}" if package.architecture else ""
    return f"pkg:{package.kind}/{distributor}{quote(name, safe='')}@{quote(package.version, safe='')}{qualifier}"


def _package(package: Package) -> dict[str, Any]:
    url = package_url(package)
    licenses = {"licenses": [{"license": {"name": package.license}}]} if package.license else {}
    kind = "library" if package.kind == "pypi" else "application"
    return {
        "type": kind,
        "bom-ref": url,
        "name": package.name,
        "version": package.version,
        "purl": url,
        **licenses,
    }


def _files(bundle: Bundle) -> list[dict[str, Any]]:
    named = {**{name: entry.sha256 for name, entry in bundle.manifest.files.items()}, "manifest.json": bundle.digest}
    return [
        {
            "type": "machine-learning-model" if _MODEL.search(name) else "file",
            "bom-ref": f"bundle/{name}",
            "name": f"bundle/{name}",
            "hashes": [{"alg": "SHA-256", "content": digest}],
        }
        for name, digest in sorted(named.items())
    ]
