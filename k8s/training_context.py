"""The build context of the training image: our whole source, the user's project, and what both import."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

from k8s.context import Recipe, begin, copy, seal, write_dockerfile, write_requirements
from k8s.lock import ACCELERATORS, PROJECT, locked_requirements
from pipeline.spec.digest import digest_file, digest_mapping
from pipeline.spec.errors import ConfigError
from pipeline.spec.sources import HOUSE, PACKAGES, outside_imports, project_sources

_RUNS = "runs"  # never part of an image: a volume is mounted there


@dataclass(frozen=True)
class Content:
    """What of a project goes into its image."""

    files: Mapping[str, str]  # path below the project → digest
    packages: tuple[str, ...]  # installed distributions its code imports
    missing: tuple[str, ...]  # modules it imports that are not installed here

    @property
    def digest(self) -> str:
        return digest_mapping(self.files)


def content_of(root: Path, references: tuple[str, ...], include: Iterable[str]) -> Content:
    """The code the task and codec reach by imports, `pipe.yaml`, and what `package.include` names."""
    sources = project_sources(root, *references)
    further = {path for pattern in include for path in _matches(root, pattern)}
    further |= {path for path in [root / "pipe.yaml"] if path.is_file()}
    files = {**sources, **{path.relative_to(root).as_posix(): digest_file(path) for path in further}}
    owners = _owners()
    modules = sorted(outside_imports(root, *references))
    packages = {name for module in modules for name in owners.get(module, ())[:1]}
    missing = tuple(module for module in modules if module not in owners)
    return Content(dict(sorted(files.items())), tuple(sorted(packages)), missing)


@functools.cache  # it reads every installed file list, and nothing is installed under a process
def _owners() -> Mapping[str, list[str]]:
    """Which distribution a module came with."""
    return packages_distributions()


def notes_of(name: str, content: Content) -> dict[str, str]:
    """What the image says of itself."""
    return {
        "org.opencontainers.image.title": f"{name}-train",
        "org.opencontainers.image.version": content.digest[:12],
        "pipe-road.project": content.digest,
    }


def write_training_context(name: str, root: Path, content: Content, recipe: Recipe, directory: Path) -> str:
    """Make the directory anew; returns its digest."""
    begin(directory)
    write_dockerfile(directory, "train", recipe, notes_of(name, content))
    pins = {accelerator: locked_requirements(accelerator, "train", content.packages) for accelerator in ACCELERATORS}
    write_requirements(directory, recipe, pins)
    for package in PACKAGES:
        copy(HOUSE / package, directory / "app" / package)
    _copy_identity(directory / "app")
    for path in content.files:
        copy(root / path, directory / "project" / path)
    return seal(directory)


def _copy_identity(app: Path) -> None:
    """The package step locks what we need by our own metadata, in a pod as here."""
    if (HOUSE / "pyproject.toml").is_file():
        copy(HOUSE / "pyproject.toml", app / "pyproject.toml")
        return
    ours = distribution(PROJECT)
    folder = app / f"{re.sub(r'[^a-z0-9]', '_', PROJECT)}-{ours.version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(ours.read_text("METADATA") or "")


def _matches(root: Path, pattern: str) -> list[Path]:
    found = [path for path in sorted(root.glob(pattern)) if path.is_file()]
    inside = [path for path in found if path.relative_to(root).parts[0] != _RUNS]
    if not inside:
        raise ConfigError(f"package.include: no file matches {pattern!r} in {root}")
    return inside
