"""The build context of the serving image: one folder that holds all a builder needs, the same bytes every time."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from k8s.lock import locked_requirements
from pipeline.spec.bundle import Bundle, open_bundle
from pipeline.spec.digest import digest_mapping, digest_tree
from pipeline.spec.errors import BundleError, ConfigError
from pipeline.spec.sources import HOUSE

_DOCKERFILE = Path(__file__).resolve().parent / "images" / "serve.Dockerfile"
_IMAGE_NAME = re.compile(r"^[a-zA-Z0-9][\w.\-/:@]*$", re.ASCII)
# What the service imports of ours; the codec inside the bundle may use any contract.
_SOURCES = ("pipeline/__init__.py", "pipeline/spec", "serve")
_IGNORE = "**/__pycache__\n**/*.pyc\n"


def write_context(bundle: Bundle, base: str, directory: Path) -> str:
    """Make the directory anew; returns its digest."""
    if not _IMAGE_NAME.match(base):
        raise ConfigError(f"package.base: {base!r} is not an image name; write it as python:3.11-slim")
    if directory.exists():  # left by an interrupted attempt
        shutil.rmtree(directory)
    directory.mkdir(parents=True)
    values = {"BASE": base, "NAME": bundle.name, "VERSION": bundle.digest[:12], "BUNDLE": bundle.digest}
    (directory / "Dockerfile").write_text(fill_arguments(_DOCKERFILE.read_text(), values))
    (directory / "requirements.txt").write_text("\n".join(locked_requirements()) + "\n")
    (directory / ".dockerignore").write_text(_IGNORE)
    _copy_bundle(bundle, directory / "bundle")
    for source in _SOURCES:
        _copy(HOUSE / source, directory / "app" / source)
    _make_readable(directory)
    return digest_mapping(digest_tree(directory))


def fill_arguments(dockerfile: str, values: Mapping[str, str]) -> str:
    """The defaults of the Dockerfile's ARGs, so that a build by hand needs no options."""
    for name, value in values.items():
        dockerfile = re.sub(rf"^ARG {name}=.*$", f"ARG {name}={value}", dockerfile, flags=re.MULTILINE)
    return dockerfile


def _copy_bundle(bundle: Bundle, target: Path) -> None:
    _copy(bundle.path, target)
    if (found := open_bundle(target).digest) != bundle.digest:
        raise BundleError(f"{target}: the bundle changed while it was copied ({bundle.digest[:12]} → {found[:12]})")


def _copy(source: Path, target: Path) -> None:
    """A file, or the files of a tree less what Python compiled."""
    files = [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file())
    for file in files:
        if "__pycache__" in file.parts or file.suffix == ".pyc":
            continue
        place = target / file.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)


def _make_readable(directory: Path) -> None:
    """For the image's user, whatever the umask of this process."""
    for path in directory.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
