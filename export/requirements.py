"""What a codec imports is what it declares: the service installs numpy and that, nothing else."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from pipeline.spec.errors import ConfigError
from pipeline.spec.sources import outside_imports

_GIVEN = {"numpy"}
_BARRED = {"torch", "transformers"}  # gigabytes in a service that runs on ONNX Runtime


def check_requirements(reference: str, root: Path, declared: tuple[str, ...]) -> tuple[str, ...]:
    """The declared packages with the versions installed here; refuses what the service could not import."""
    pins = tuple(_pin(reference, text) for text in declared)
    allowed = _GIVEN | {canonicalize_name(pin.partition("==")[0]) for pin in pins}
    owners = metadata.packages_distributions() if (found := outside_imports(root, reference)) - _GIVEN else {}
    for module in sorted(found):
        names = {canonicalize_name(name) for name in owners.get(module, [module])}
        if not names & allowed:
            raise ConfigError(
                f"{reference}: imports {module}, which the service does not install; declare it in the codec's class, "
                f'as in requires = ("{min(names)}",), or do without'
            )
    return pins


def _pin(reference: str, text: str) -> str:
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        raise ConfigError(
            f'{reference}: `requires` has {text!r}; write a package\'s name, as in "tokenizers"'
        ) from error
    name = canonicalize_name(requirement.name)
    if name in _BARRED:
        raise ConfigError(f"{reference}: `requires` has {name}, which no service of ours carries; decode without it")
    try:
        version = Version(metadata.version(name))
    except metadata.PackageNotFoundError:
        raise ConfigError(f"{reference}: needs {text}, which is not installed here; `pip install {name}`") from None
    if not requirement.specifier.contains(version, prereleases=True):
        raise ConfigError(f"{reference}: needs {text}, but {version} is installed here")
    return f"{name}=={version.public}"
