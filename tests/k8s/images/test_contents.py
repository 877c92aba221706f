from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from k8s.images.contents import Package, bill_of_materials, image_provenance, packages_from_pins, serving_requirements
from pipeline.contract.bundle import PROVENANCE, Bundle, open_bundle, statement
from pipeline.system.files import write_json

PACKAGES = [Package("PyYAML", "6.0.3"), Package("numpy", "2.4.6")]
SUBJECT = {"name": "r.example/twice", "version": "0123456789ab"}


def written(bundle: Bundle | None = None) -> dict[str, Any]:
    body: dict[str, Any] = bill_of_materials(SUBJECT, PACKAGES, bundle)
    return body


def test_the_bill_of_materials_is_valid_cyclonedx(bundle: Bundle) -> None:
    check = JsonStrictValidator(SchemaVersion.V1_6)
    assert check.validate_str(json.dumps(written(bundle))) is None
    assert check.validate_str(json.dumps({**written(bundle), "version": 0})) is not None, "the validator rejects"


def test_bundle_files_are_listed_with_digests(bundle: Bundle) -> None:
    files = {
        component["name"]: component["hashes"][0]["content"]
        for component in written(bundle)["components"]
        if component["name"].startswith("bundle/")
    }
    assert files.pop("bundle/manifest.json") == bundle.digest
    assert files == {f"bundle/{name}": entry.sha256 for name, entry in bundle.manifest.files.items()}


def test_packages_have_their_package_urls() -> None:
    urls = [part["purl"] for part in written()["components"]]
    assert urls == ["pkg:pypi/pyyaml@6.0.3", "pkg:pypi/numpy@2.4.6"]


def test_the_serial_number_depends_on_the_content(bundle: Bundle) -> None:
    assert written(bundle) == written(bundle)
    assert written(bundle)["serialNumber"] != written()["serialNumber"]


def test_bill_of_materials_links_the_image_to_all_components(bundle: Bundle) -> None:
    body = written(bundle)
    assert body["dependencies"] == [{"ref": "image", "dependsOn": [part["bom-ref"] for part in body["components"]]}]


@pytest.mark.parametrize("accelerator", ["cpu", "gpu"])
def test_locked_requirements_are_listed(accelerator: str) -> None:
    lines = serving_requirements(accelerator)
    assert len(packages_from_pins(lines)) == len(lines)
    assert all(package.version[0].isdigit() for package in packages_from_pins(lines))


def test_the_provenance_names_run_bundle_base_and_sources(bundle: Bundle, tmp_path: Path) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(bundle.path, copy)
    raw = (copy / "manifest.json").read_bytes()
    model = statement(bundle.manifest, raw, {"train": {"lr": 0.1}}, {"torch": "2.11"}, {"python": "3.11"})
    write_json(copy / PROVENANCE, model)
    materials = {"context": "c" * 64, "python:3.11-slim": f"sha256:{'b' * 64}", "unknown": None}
    predicate = image_provenance(open_bundle(copy), materials, "20260101-120000-a1b2")
    build, details = predicate["buildDefinition"], predicate["runDetails"]
    digests = {item["name"]: item.get("digest", item.get("uri")) for item in build["resolvedDependencies"]}
    assert build["externalParameters"] == {"config": {"train": {"lr": 0.1}}}
    assert (digests["bundle"], digests["context"]) == ({"sha256": bundle.digest}, {"sha256": "c" * 64})
    assert (digests["python:3.11-slim"], "unknown" in digests) == ({"sha256": "b" * 64}, False)
    assert (digests["checkpoint"], digests["torch"]) == ({"sha256": "c"}, "pkg:pypi/torch@2.11")
    assert details["metadata"] == {"invocationId": "20260101-120000-a1b2"}
    assert details["builder"]["version"] == {"python": "3.11"}
    assert build["internalParameters"] == {"verdict": "pass"}
    image_provenance(bundle, {}, "run")  # a bundle may come without provenance
