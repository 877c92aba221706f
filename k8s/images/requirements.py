"""Exact versions of all packages that an image needs, from those installed here."""

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
# Images are for Linux on x86-64, with the Python version that runs here.
_IMAGE_PLATFORM = {
    "os_name": "posix",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
}
# Released together with the same version; which of them is installed depends on the machine.
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


def locked_requirements(accelerator: str, extra: str = "serve", also: Iterable[str] = ()) -> list[str]:
    """Return `name==version` of our requirements with an extra, further requirements, and all dependencies, sorted."""
    pins = lock_requirements([*_own_requirements(extra), *also])
    return [_for_accelerator(pin, _ACCELERATOR_PINS[accelerator]) for pin in pins if not pin.startswith(f"{PROJECT}==")]


def _for_accelerator(pin: str, templates: Mapping[str, str]) -> str:
    name, _, version = pin.partition("==")
    return templates[name].format(version) if name in templates else pin


def lock_requirements(requirements: Iterable[str]) -> list[str]:
    """Return requirements and all their dependencies, with the installed versions."""
    return list(_dependency_closure(tuple(requirements)))


@functools.cache  # reading the metadata of installed packages is slow
def _dependency_closure(requirements: tuple[str, ...]) -> tuple[str, ...]:
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
                queue += [need for need in needs if applies_to_image(need, extra)]
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
                f"the image needs {requirement}, but {installed.version} is installed; `pip install .[all]`"
            )
        return version.public, [Requirement(text) for text in installed.requires or []]
    raise StageError(f"the image needs {name}, which is not installed here; `pip install .[all]`")


def _own_requirements(extra: str) -> list[str]:
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
