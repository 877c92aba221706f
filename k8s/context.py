"""The build context of an image: one folder that holds all a builder needs, the same bytes every time."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import parse_wheel_filename

from k8s.lock import ACCELERATORS, locked_requirements
from k8s.modelcar import notes_of
from k8s.sbom import pinned
from pipeline.spec.bundle import Bundle, open_bundle
from pipeline.spec.digest import digest_mapping, digest_tree
from pipeline.spec.errors import BundleError, ConfigError
from pipeline.spec.sources import HOUSE

_IMAGES = Path(__file__).resolve().parent / "images"
_IMAGE_NAME = re.compile(r"^[a-zA-Z0-9][\w.\-/:@]*$", re.ASCII)
# What the service imports of ours; the codec inside the bundle may use any contract.
_SOURCES = ("pipeline/__init__.py", "pipeline/spec", "serve")
_IGNORE = "**/__pycache__\n**/*.pyc\n"
_NOTED = {
    "NAME": "org.opencontainers.image.title",
    "VERSION": "org.opencontainers.image.version",
    "BUNDLE": "pipe-road.bundle",
    "PROJECT": "pipe-road.project",
}


@dataclass(frozen=True)
class Recipe:
    """What an image is built of and for, beside its content."""

    base: str
    accelerator: str  # cpu or gpu
    wheels: Path | None = None  # a folder pip looks in first


def write_context(bundle: Bundle, recipe: Recipe, directory: Path) -> str:
    """Make the directory of the serving image anew; returns its digest."""
    begin(directory)
    write_dockerfile(directory, "serve", recipe, notes_of(bundle))
    write_requirements(
        directory, recipe, {name: locked_requirements(name, also=bundle.signature.requires) for name in ACCELERATORS}
    )
    copy(_IMAGES / "slim.py", directory / "slim.py")
    _copy_bundle(bundle, directory / "bundle")
    for source in _SOURCES:
        copy(HOUSE / source, directory / "app" / source)
    return seal(directory)


def begin(directory: Path) -> None:
    if directory.exists():  # left by an interrupted attempt
        shutil.rmtree(directory)
    directory.mkdir(parents=True)
    (directory / ".dockerignore").write_text(_IGNORE)


def write_dockerfile(directory: Path, name: str, recipe: Recipe, notes: Mapping[str, str]) -> None:
    """With everything filled in, so that it can be built by hand as well."""
    if not _IMAGE_NAME.fullmatch(recipe.base):
        raise ConfigError(f"package.base: {recipe.base!r} is not an image name; write it as python:3.11-slim")
    values = {"BASE": recipe.base, "ACCELERATOR": recipe.accelerator}
    values |= {argument: notes[key] for argument, key in _NOTED.items() if key in notes}
    text = (_IMAGES / f"{name}.Dockerfile").read_text()
    (directory / "Dockerfile").write_text(fill_arguments(text, values))


def write_requirements(directory: Path, recipe: Recipe, pins: Mapping[str, Sequence[str]]) -> None:
    """One file an accelerator: which is taken is a build argument. Of the wheels only those that any of them names."""
    for accelerator, lines in pins.items():
        (directory / f"requirements-{accelerator}.txt").write_text("\n".join(lines) + "\n")
    target = directory / "wheels"
    target.mkdir()
    (target / "README").write_text("pip looks here before it asks an index\n")
    if recipe.wheels is None:
        return
    wanted = {(package.name, package.version) for lines in pins.values() for package in pinned(lines)}
    for wheel in sorted(recipe.wheels.glob("*.whl")):
        name, version, _, _ = parse_wheel_filename(wheel.name)
        if (name, version.public) in wanted:
            shutil.copyfile(wheel, target / wheel.name)


def seal(directory: Path) -> str:
    """Readable for the image's user, whatever the umask of this process; returns its digest."""
    for path in directory.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return digest_mapping(digest_tree(directory))


def fill_arguments(dockerfile: str, values: Mapping[str, str]) -> str:
    """The defaults of the Dockerfile's ARGs, so that a build by hand needs no options."""
    for name, value in values.items():
        dockerfile = re.sub(rf"^ARG {name}=.*$", f"ARG {name}={value}", dockerfile, flags=re.MULTILINE)
    return dockerfile


def _copy_bundle(bundle: Bundle, target: Path) -> None:
    copy(bundle.path, target)
    if (found := open_bundle(target).digest) != bundle.digest:
        raise BundleError(f"{target}: the bundle changed while it was copied ({bundle.digest[:12]} → {found[:12]})")


def copy(source: Path, target: Path) -> None:
    """A file, or the files of a tree less what Python compiled."""
    files = [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file())
    for file in files:
        if "__pycache__" in file.parts or file.suffix == ".pyc":
            continue
        place = target / file.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)
