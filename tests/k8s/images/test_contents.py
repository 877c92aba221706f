from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from k8s.images.contents import (
    Package,
    bill_of_materials,
    package_url,
    packages_from_pins,
    parse_package_databases,
    read_installed_packages,
    serving_requirements,
)
from pipeline.contract.bundle import Bundle
from pipeline.contract.errors import StageError
from tests.pipeline.packing import tar_of

SITE = "venv/lib/python3.11/site-packages"
NUMPY = b"Metadata-Version: 2.4\nName: numpy\nVersion: 2.4.6\nLicense-Expression: BSD-3-Clause\n\nThe text.\n"
DPKG = b"""Package: libc6
Status: install ok installed
Architecture: amd64
Version: 2.36-9+deb12u10
Description: GNU C Library
 continued: here

Package: gone
Status: deinstall ok config-files
Version: 1
"""
APK = b"C:Q1abc\nP:musl\nV:1.2.5-r0\nA:x86_64\nL:MIT\n\nP:busybox\nV:1.36.1-r15\nA:x86_64\n"


def oci(layers: Sequence[bytes]) -> dict[str, bytes]:
    files: dict[str, bytes] = {}

    def put(content: bytes) -> dict[str, str]:
        digest = hashlib.sha256(content).hexdigest()
        files[f"blobs/sha256/{digest}"] = content
        return {"digest": f"sha256:{digest}"}

    manifest = {"layers": [put(gzip.compress(layer)) for layer in layers]}
    index = {"manifests": [put(json.dumps(manifest).encode())]}
    files["index.json"] = json.dumps({"manifests": [put(json.dumps(index).encode())]}).encode()
    return files


def docker(layers: Sequence[bytes]) -> dict[str, bytes]:
    names = [f"{i}/layer.tar" for i in range(len(layers))]
    manifest = json.dumps([{"Config": "config.json", "Layers": names}]).encode()
    return {**dict(zip(names, layers, strict=True)), "manifest.json": manifest}


@pytest.mark.parametrize("form", [oci, docker])
def test_later_layers_replace_and_hide_earlier_files(form: object, tmp_path: Path) -> None:
    layers = [
        {
            "var/lib/dpkg/status": DPKG,
            f"{SITE}/old-1.dist-info/METADATA": b"Name: old\nVersion: 1\n",
            "opt/lib/python3/site-packages/swept-1.dist-info/METADATA": b"Name: swept\nVersion: 1\n",
            "usr/share/doc/METADATA": b"Name: no-package\nVersion: 1\n",
        },
        {
            f"./{SITE}/numpy-2.4.6.dist-info/METADATA": NUMPY,
            f"{SITE}/.wh.old-1.dist-info": b"",
            "opt/lib/.wh..wh..opq": b"",
        },
    ]
    archive = tmp_path / "image.tar"
    archive.write_bytes(tar_of(form([tar_of(layer) for layer in layers])))  # type: ignore[operator]
    assert read_installed_packages(archive) == [
        Package("deb", "libc6", "2.36-9+deb12u10", architecture="amd64"),
        Package("pypi", "numpy", "2.4.6", "BSD-3-Clause"),
    ]


def test_packages_of_alpine_are_read() -> None:
    assert parse_package_databases({"lib/apk/db/installed": APK}) == [
        Package("apk", "busybox", "1.36.1-r15", "", "x86_64"),
        Package("apk", "musl", "1.2.5-r0", "MIT", "x86_64"),
    ]


def test_an_archive_without_an_image_is_an_error(tmp_path: Path) -> None:
    archive = tmp_path / "image.tar"
    archive.write_bytes(tar_of({"readme": b"hello"}))
    with pytest.raises(StageError, match="neither docker's nor OCI's"):
        read_installed_packages(archive)


def test_an_unreadable_layer_is_an_error(tmp_path: Path) -> None:
    archive = tmp_path / "image.tar"
    archive.write_bytes(tar_of(docker([b"\x28\xb5\x2f\xfd" + bytes(2000)])))
    with pytest.raises(StageError, match=r"layer 0/layer\.tar"):
        read_installed_packages(archive)


INSTALLED = [
    Package("apk", "musl", "1.2.5-r0", "MIT", "x86_64"),
    Package("deb", "libstdc++6", "12.2.0-14+deb12u1", architecture="amd64"),
    Package("pypi", "PyYAML", "6.0.3", "MIT OR Apache-2.0"),
]
SUBJECT = {"name": "r.example/twice", "version": "0123456789ab", "source": "image"}


def written(bundle: Bundle | None = None) -> dict[str, Any]:
    body: dict[str, Any] = bill_of_materials(SUBJECT, INSTALLED, bundle)
    return body


def test_the_bill_of_materials_is_valid_cyclonedx(bundle: Bundle) -> None:
    check = JsonStrictValidator(SchemaVersion.V1_6)
    assert check.validate_str(json.dumps(written(bundle))) is None
    assert check.validate_str(json.dumps({**written(bundle), "version": 0})) is not None, "or the check checks nothing"


def test_bundle_files_are_listed_with_digests(bundle: Bundle) -> None:
    files = {
        component["name"]: component["hashes"][0]["content"]
        for component in written(bundle)["components"]
        if component["name"].startswith("bundle/")
    }
    assert files.pop("bundle/manifest.json") == bundle.digest
    assert files == {f"bundle/{name}": entry.sha256 for name, entry in bundle.manifest.files.items()}


def test_packages_have_their_package_urls() -> None:
    assert [package_url(package) for package in INSTALLED] == [
        "pkg:apk/alpine/musl@1.2.5-r0?arch=x86_64",
        "pkg:deb/debian/libstdc%2B%2B6@12.2.0-14%2Bdeb12u1?arch=amd64",
        "pkg:pypi/pyyaml@6.0.3",
    ]


def test_the_serial_number_depends_on_the_content(bundle: Bundle) -> None:
    assert written(bundle) == written(bundle)
    assert written(bundle)["serialNumber"] != written()["serialNumber"]


def test_the_image_depends_on_all_components(bundle: Bundle) -> None:
    body = written(bundle)
    assert body["dependencies"] == [{"ref": "image", "dependsOn": [part["bom-ref"] for part in body["components"]]}]


@pytest.mark.parametrize("accelerator", ["cpu", "gpu"])
def test_without_an_image_locked_requirements_are_listed(accelerator: str) -> None:
    lines = serving_requirements(accelerator)
    assert len(packages_from_pins(lines)) == len(lines)
    assert all(package.version[0].isdigit() for package in packages_from_pins(lines))
