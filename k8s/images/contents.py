"""What is in an image: exact versions of all packages it needs, the bill of materials in CycloneDX, and the provenance.

Versions are those installed here. The bill lists the packages that the image's requirements pin, and the bundle's files
with digests; what the base image brings is for a scanner of images to list.
"""

from __future__ import annotations

import functools
import json
import re
import tomllib
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any
from urllib.parse import quote

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from pipeline.contract.bundle import BUILDER, PROVENANCE, Bundle
from pipeline.system.errors import StageError, install_command
from pipeline.system.files import digest_mapping
from pipeline.system.sources import SOURCE_ROOT


@dataclass(frozen=True)
class Package:
    name: str
    version: str


_SCHEMA = "http://cyclonedx.org/schema/bom-1.6.schema.json"
_MODEL = re.compile(r"\.(onnx|data)$")


def bill_of_materials(subject: Mapping[str, str], packages: Iterable[Package], bundle: Bundle | None) -> dict[str, Any]:
    """Return the document; it has no date and its serial number depends on the content, so it is reproducible."""
    components = [_package_component(package) for package in packages] + (_bundle_components(bundle) if bundle else [])
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


def packages_from_pins(requirements: Iterable[str]) -> list[Package]:
    """Return the packages of locked requirements."""
    pairs = (re.match(r"([\w.\-]+)(?:\[[^\]]*\])?==([^,;\s]+)", line) for line in requirements)
    return [Package(pair[1], pair[2]) for pair in pairs if pair]


def _package_component(package: Package) -> dict[str, Any]:
    url = f"pkg:pypi/{canonicalize_name(package.name)}@{quote(package.version, safe='')}"
    return {"type": "library", "bom-ref": url, "name": package.name, "version": package.version, "purl": url}


def _bundle_components(bundle: Bundle) -> list[dict[str, Any]]:
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


def image_provenance(bundle: Bundle, materials: Mapping[str, str | None], run: str) -> dict[str, Any]:
    """Return the SLSA predicate of an image with a bundle: its own build, and that of the model.

    `materials` are the SHA-256 digests of what else the image is made from, where they are known.
    """
    path = bundle.path / PROVENANCE  # a bundle may come without it
    model = json.loads(path.read_bytes())["predicate"] if path.is_file() else {}
    definition, builder = model.get("buildDefinition", {}), model.get("runDetails", {}).get("builder", {})
    dependencies = [
        {"name": name, "digest": {"sha256": digest.removeprefix("sha256:")}}
        for name, digest in {"bundle": bundle.digest, **materials}.items()
        if digest
    ]
    return {
        "buildDefinition": {
            "buildType": f"{BUILDER}#package",
            "externalParameters": definition.get("externalParameters", {}),
            "internalParameters": {"verdict": bundle.manifest.verdict},
            "resolvedDependencies": [*dependencies, *definition.get("resolvedDependencies", ())],
        },
        "runDetails": {"builder": {"id": f"{BUILDER}#pipe", **builder}, "metadata": {"invocationId": run}},
    }


PROJECT = "pipe-road"
# Images are for Linux on x86-64, with the Python version that runs here.
_IMAGE_PLATFORM = {
    "os_name": "posix",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
}
# Released together with the same version; which of them is installed depends on the extra.
_SAME_RELEASE = {"onnxruntime-gpu": "onnxruntime", "onnxruntime": "onnxruntime-gpu"}
# Requirements that differ with the accelerator. The CUDA libraries are not locked: few of the machines that build
# images have them installed, so pip chooses the versions that these packages require.
_ACCELERATOR_PINS = {
    "cpu": {"onnxruntime-gpu": "onnxruntime=={}"},
    "gpu": {
        "onnxruntime": "onnxruntime-gpu[cuda,cudnn]=={}",
        "onnxruntime-gpu": "onnxruntime-gpu[cuda,cudnn]=={}",
        "torch": "torch=={0},!={0}+cpu",  # pip considers the local version for CPU newer
    },
}
ACCELERATORS = tuple(_ACCELERATOR_PINS)
# Requirements that the service never imports: those of the command line, and the client that downloads tokenizers.
_NOT_SERVED = {(PROJECT, "psutil"), (PROJECT, "typer"), ("tokenizers", "huggingface-hub")}


def serving_requirements(accelerator: str, also: Iterable[str] = ()) -> list[str]:
    """Return `name==version` of all that the service imports, and of further requirements, sorted.

    To be installed without the dependencies that the packages name.
    """
    own = [text for text in own_requirements("serve") if (PROJECT, Requirement(text).name) not in _NOT_SERVED]
    return _for_accelerator(lock_requirements((*own, *also), all_needs=False), accelerator)


def locked_requirements(accelerator: str, extra: str, also: Iterable[str] = ()) -> list[str]:
    """Return `name==version` of our requirements with an extra, further requirements, and all dependencies, sorted."""
    return _for_accelerator(lock_requirements((*own_requirements(extra), *also)), accelerator)


def _for_accelerator(pins: Iterable[str], accelerator: str) -> list[str]:
    templates = _ACCELERATOR_PINS[accelerator]
    packages = [(pin, *pin.split("==")) for pin in pins]
    return [
        templates[name].format(version) if name in templates else pin
        for pin, name, version in packages
        if name != PROJECT
    ]


@functools.cache  # reading the metadata of installed packages is slow
def lock_requirements(requirements: tuple[str, ...], *, all_needs: bool = True) -> tuple[str, ...]:
    """Return requirements and all their dependencies, with the installed versions."""
    queue = [Requirement(text) for text in requirements]
    versions: dict[str, str] = {}
    expanded: set[tuple[str, str]] = set()  # a distribution and one of its extras; "" is none
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        versions[name], needs = _installed_version(name, requirement)
        for extra in ("", *requirement.extras):
            if (name, extra) not in expanded:
                expanded.add((name, extra))
                queue += [
                    need
                    for need in needs
                    if applies_to_image(need, extra)
                    and (all_needs or (name, canonicalize_name(need.name)) not in _NOT_SERVED)
                ]
    return tuple(f"{name}=={versions[name]}" for name in sorted(versions))


def applies_to_image(requirement: Requirement, extra: str) -> bool:
    """Return whether a requirement applies in the image, if its owner is installed with this extra."""
    if requirement.marker is None:
        return not extra
    environment = {**{name: str(value) for name, value in default_environment().items()}, **_IMAGE_PLATFORM}
    return requirement.marker.evaluate({**environment, "extra": extra})


def _installed_version(name: str, requirement: Requirement) -> tuple[str, list[Requirement]]:
    for candidate in (name, _SAME_RELEASE.get(name, name)):
        try:
            installed = distribution(candidate)
        except PackageNotFoundError:
            continue
        version = Version(installed.version)
        if not requirement.specifier.contains(version, prereleases=True):
            raise StageError(
                f"the image needs {requirement}, but {installed.version} is installed; "
                f"to fix it: {install_command('all')}"
            )
        return version.public, [Requirement(text) for text in installed.requires or []]
    raise StageError(f"the image needs {name}, which is not installed here; to fix it: pip install {name}")


def own_requirements(extra: str) -> list[str]:
    """Return our own requirements, in a checkout from pyproject.toml: installed metadata may be outdated."""
    path = SOURCE_ROOT / "pyproject.toml"
    if path.is_file():
        project = tomllib.loads(path.read_text())["project"]
        extras = project["optional-dependencies"]
        return [
            _without_marker(need)
            for need in _expand_own_extras(project["dependencies"] + extras[extra], extras)
            if applies_to_image(need, "")
        ]
    needs = [Requirement(text) for text in distribution(PROJECT).requires or []]
    return [_without_marker(need) for need in needs if applies_to_image(need, "") or applies_to_image(need, extra)]


def _expand_own_extras(texts: Iterable[str], extras: Mapping[str, list[str]]) -> Iterator[Requirement]:
    """Replace our own package with extras, as in `all`, by the requirements of those extras."""
    for requirement in map(Requirement, texts):
        if canonicalize_name(requirement.name) == PROJECT:
            for extra in sorted(requirement.extras):
                yield from _expand_own_extras(extras[extra], extras)
        else:
            yield requirement


def _without_marker(requirement: Requirement) -> str:
    requirement.marker = None
    return str(requirement)
