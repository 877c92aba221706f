from __future__ import annotations

import json
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from k8s.inventory import Package
from k8s.lock import locked_requirements
from k8s.sbom import document, package_url, pinned
from pipeline.spec.bundle import Bundle

INSTALLED = [
    Package("apk", "musl", "1.2.5-r0", "MIT", "x86_64"),
    Package("deb", "libstdc++6", "12.2.0-14+deb12u1", architecture="amd64"),
    Package("pypi", "PyYAML", "6.0.3", "MIT OR Apache-2.0"),
]
SUBJECT = {"name": "r.example/twice", "version": "0123456789ab", "source": "image"}


def written(bundle: Bundle | None = None) -> dict[str, Any]:
    body: dict[str, Any] = document(SUBJECT, INSTALLED, bundle)
    return body


def test_it_is_what_cyclonedx_asks_for(bundle: Bundle) -> None:
    check = JsonStrictValidator(SchemaVersion.V1_6)
    assert check.validate_str(json.dumps(written(bundle))) is None
    assert check.validate_str(json.dumps({**written(bundle), "version": 0})) is not None, "or the check checks nothing"


def test_every_file_of_the_bundle_is_named_with_its_digest(bundle: Bundle) -> None:
    files = {
        component["name"]: component["hashes"][0]["content"]
        for component in written(bundle)["components"]
        if component["name"].startswith("bundle/")
    }
    assert files.pop("bundle/manifest.json") == bundle.digest
    assert files == {f"bundle/{name}": entry.sha256 for name, entry in bundle.manifest.files.items()}


def test_packages_are_named_as_others_name_them() -> None:
    assert [package_url(package) for package in INSTALLED] == [
        "pkg:apk/alpine/musl@1.2.5-r0?arch=x86_64",
        "pkg:deb/debian/libstdc%2B%2B6@12.2.0-14%2Bdeb12u1?arch=amd64",
        "pkg:pypi/pyyaml@6.0.3",
    ]


def test_the_same_content_gives_the_same_document_and_another_another_number(bundle: Bundle) -> None:
    assert written(bundle) == written(bundle)
    assert written(bundle)["serialNumber"] != written()["serialNumber"]


def test_everything_is_what_the_image_depends_on(bundle: Bundle) -> None:
    body = written(bundle)
    assert body["dependencies"] == [{"ref": "image", "dependsOn": [part["bom-ref"] for part in body["components"]]}]


@pytest.mark.parametrize("accelerator", ["cpu", "gpu"])
def test_without_an_image_the_locked_requirements_are_listed_all(accelerator: str) -> None:
    lines = locked_requirements(accelerator)
    assert len(pinned(lines)) == len(lines)
    assert all(package.version[0].isdigit() for package in pinned(lines))
