"""Exact versions of everything an image needs, from what is installed here."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distribution

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from pipeline.contract.errors import StageError
from pipeline.contract.sources import SOURCE_ROOT

PROJECT = "pipe-road"
# The image is Linux on x86-64 whatever this machine is; the interpreter's version is the one that runs here.
_IMAGE_PLATFORM = {
    "os_name": "posix",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
}
# Released together under one version; which one is installed depends on the machine.
_SAME_RELEASE = {"onnxruntime-gpu": "onnxruntime", "onnxruntime": "onnxruntime-gpu"}
# What stands in the requirements of an image with this accelerator. CUDA's own libraries come along as what these two
# ask for: they are installed on few of the machines that make images, and so cannot be read off here.
_ACCELERATOR_PINS = {
    "cpu": {"onnxruntime-gpu": "onnxruntime=={}"},
    "gpu": {
        "onnxruntime": "onnxruntime-gpu[cuda,cudnn]=={}",
        "onnxruntime-gpu": "onnxruntime-gpu[cuda,cudnn]=={}",
        "torch": "torch=={0},!={0}+cpu",  # pip would take the build for CPU, where it sees one, for the newer
    },
}
ACCELERATORS = tuple(_ACCELERATOR_PINS)


def locked_requirements(accelerator: str, extra: str = "serve", also: Iterable[str] = ()) -> list[str]:
    """`name==version` of the base, an extra and what else is wanted, with all they need, sorted."""
    pins = lock_requirements([*_own_requirements(extra), *also])
    return [_for_accelerator(pin, _ACCELERATOR_PINS[accelerator]) for pin in pins if not pin.startswith(f"{PROJECT}==")]


def _for_accelerator(pin: str, forms: Mapping[str, str]) -> str:
    name, _, version = pin.partition("==")
    return forms[name].format(version) if name in forms else pin


def lock_requirements(wanted: Iterable[str]) -> list[str]:
    """The closure of some requirements over installed distributions."""
    return list(_dependency_closure(tuple(wanted)))


@functools.cache  # what is installed does not change under a process, and reading it takes a while
def _dependency_closure(wanted: tuple[str, ...]) -> tuple[str, ...]:
    waiting = [Requirement(text) for text in wanted]
    versions: dict[str, str] = {}
    followed: set[tuple[str, str]] = set()  # a distribution and one of its extras; "" is none
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        found, needs = _installed_version(name, requirement)
        versions[name] = found
        for extra in ("", *requirement.extras):
            if (name, extra) not in followed:
                followed.add((name, extra))
                waiting += [need for need in needs if applies_to_image(need, extra)]
    return tuple(f"{name}=={versions[name]}" for name in sorted(versions))


def applies_to_image(requirement: Requirement, extra: str) -> bool:
    """Whether a requirement counts in the image when its owner is asked for with this extra."""
    if requirement.marker is None:
        return not extra
    environment = {**{name: str(value) for name, value in default_environment().items()}, **_IMAGE_PLATFORM}
    return requirement.marker.evaluate({**environment, "extra": extra})


def _installed_version(name: str, requirement: Requirement) -> tuple[str, list[Requirement]]:
    for candidate in (name, _SAME_RELEASE.get(name, name)):
        try:
            found = distribution(candidate)
        except PackageNotFoundError:
            continue
        version = Version(found.version)
        if not requirement.specifier.contains(version, prereleases=True):
            raise StageError(f"the image needs {requirement}, but {found.version} is installed; `pip install .[all]`")
        return version.public, [Requirement(text) for text in found.requires or []]
    raise StageError(f"the image needs {name}, which is not installed here; `pip install .[all]`")


def _own_requirements(extra: str) -> list[str]:
    """Ours: in a checkout as written in pyproject.toml, which installed metadata may lag behind."""
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
    """An extra may name others of ours: their requirements in its place."""
    for requirement in map(Requirement, texts):
        if canonicalize_name(requirement.name) == PROJECT:
            for extra in sorted(requirement.extras):
                yield from _expand_own_extras(extras[extra], extras)
        else:
            yield requirement


def _without_marker(requirement: Requirement) -> str:
    requirement.marker = None
    return str(requirement)
