"""Exact versions of everything the prediction service needs, from what is installed here."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from pipeline.spec.errors import StageError
from pipeline.spec.sources import HOUSE

PROJECT = "pipe-road"
# The image is Linux on x86-64 whatever this machine is; the interpreter's version is the one that runs here.
_IMAGE_PLATFORM = {
    "os_name": "posix",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
}
# Released together under one version; which one is installed depends on the machine.
_SAME_RELEASE = {"onnxruntime-gpu": "onnxruntime"}


def locked_requirements() -> list[str]:
    """`name==version` of the base and the `serve` extra, with all they need, sorted."""
    return locked(_own_requirements("serve"))


def locked(wanted: Iterable[str]) -> list[str]:
    """The closure of some requirements over installed distributions."""
    waiting = [Requirement(text) for text in wanted]
    versions: dict[str, str] = {}
    followed: set[tuple[str, str]] = set()  # a distribution and one of its extras; "" is none
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        found, needs = _installed(name, requirement)
        versions[name] = found
        for extra in ("", *requirement.extras):
            if (name, extra) not in followed:
                followed.add((name, extra))
                waiting += [need for need in needs if applies(need, extra)]
    return [f"{name}=={versions[name]}" for name in sorted(versions)]


def applies(requirement: Requirement, extra: str) -> bool:
    """Whether a requirement counts in the image when its owner is asked for with this extra."""
    if requirement.marker is None:
        return not extra
    environment = {**{name: str(value) for name, value in default_environment().items()}, **_IMAGE_PLATFORM}
    return requirement.marker.evaluate({**environment, "extra": extra})


def _installed(name: str, requirement: Requirement) -> tuple[str, list[Requirement]]:
    for candidate in (name, _SAME_RELEASE.get(name, name)):
        try:
            found = distribution(candidate)
        except PackageNotFoundError:
            continue
        version = Version(found.version)
        if not requirement.specifier.contains(version, prereleases=True):
            raise StageError(f"the image needs {requirement}, but {found.version} is installed; `pip install .[serve]`")
        return version.public, [Requirement(text) for text in found.requires or []]
    raise StageError(f"the image needs {name}, which is not installed here; `pip install .[serve]`")


def _own_requirements(extra: str) -> list[str]:
    """Ours: in a checkout as written in pyproject.toml, which installed metadata may lag behind."""
    path = HOUSE / "pyproject.toml"
    if path.is_file():
        project = tomllib.loads(path.read_text())["project"]
        wanted = [Requirement(text) for text in project["dependencies"] + project["optional-dependencies"][extra]]
        return [_bare(requirement) for requirement in wanted if applies(requirement, "")]
    needs = [Requirement(text) for text in distribution(PROJECT).requires or []]
    return [_bare(need) for need in needs if applies(need, "") or applies(need, extra)]


def _bare(requirement: Requirement) -> str:
    requirement.marker = None
    return str(requirement)
