"""An image from its build context: built where a builder works, looked into, pushed; what is on record of it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k8s.base import Base, resolve
from k8s.builder import Work, annotates, build, build_argv, find_builder, push, save
from k8s.context import Recipe
from k8s.inventory import Package as Installed
from k8s.inventory import read_image
from k8s.reference import parse
from k8s.sbom import document, pinned
from pipeline.spec.bundle import Bundle
from pipeline.spec.config import Config
from pipeline.spec.errors import ConfigError, StageError
from pipeline.spec.files import write_json
from pipeline.spec.sections import Package

SBOM = "sbom.cdx.json"


@dataclass(frozen=True)
class Order:
    """What is to be built, and where its files go."""

    image: str  # with its tag
    folder: Path  # holds `context`; the bill of materials goes here
    final: Path  # what the folder is called when all is done
    log: Path | None  # where the builder's output is kept
    notes: Mapping[str, str]
    needed: bool  # the road may not go on without it


def recipe_of(package: Package, root: Path, cuda: bool) -> Recipe:
    accelerator = package.accelerator if package.accelerator != "auto" else "gpu" if cuda else "cpu"
    if not package.wheels:
        return Recipe(package.base, accelerator)
    wheels = root / package.wheels
    if not any(wheels.glob("*.whl")):
        raise ConfigError(f"package.wheels: no wheel in {wheels}; name a folder of .whl files in the project")
    return Recipe(package.base, accelerator, wheels)


def base_name(config: Config) -> str:
    name = config.package.image or config.name
    if "@" in name or ":" in name.rpartition("/")[2]:
        raise ConfigError(f"package.image: {name!r} has a tag; give the name alone, the content's digest is the tag")
    if config.package.push and "/" not in name:
        raise ConfigError(f"package.push: {name!r} names no registry; set package.image, as in registry.example/{name}")
    return name


def make(
    config: Config, order: Order, accelerator: str, bundle: Bundle | None, env: Mapping[str, str]
) -> dict[str, Any]:
    """Build, list, push; returns what image.json says of it."""
    made = _build(config.package, order, env)
    if made["image_digest"] is None:
        lines = (order.folder / "context" / f"requirements-{accelerator}.txt").read_text().splitlines()
        installed, source = pinned(lines), "requirements"
    else:
        installed, source = _look_inside(made["builder"], order, env), "image"
    if config.package.push and made["image_digest"] is not None:
        digest = push(made["builder"], order.image, order.folder / ".pushed", env)
        made["reference"] = parse(order.image).at(digest)
        print(f"pushed {made['reference']}", flush=True)
    _write_sbom(order, {"source": source, **made}, installed, bundle)
    return {**made, "sbom": SBOM}


def _build(package: Package, order: Order, env: Mapping[str, str]) -> dict[str, Any]:
    """Raises where the road may not go on without an image."""
    needed = order.needed or package.build == "require"
    if package.build == "never":
        return _without_image(None, "package.build is never", order)
    search = find_builder(package.builder, env)
    if search.builder is None:
        reason = f"no container builder works: {search.reason}"
        if needed:
            raise StageError(f"{reason}; install one, or set package.build=auto")
        return _without_image(None, reason, order)
    base = _base(package, env)
    print(f"building {order.image} with {search.builder}", flush=True)
    built = build(search.builder, _work(order, order.folder, base), order.folder / ".image-id", env)
    if built.image_digest is None:
        where = f"; its whole output is in {order.log}" if order.log else ""
        reason = f"{search.builder} could not build {order.image}: {built.said}{where}"
        if needed:
            raise StageError(f"{reason}; package.build=never goes on without an image")
        print(f"WARNING: {reason}", file=sys.stderr)
        return _without_image(search.builder, reason, order)
    print(f"built {order.image}, {built.image_digest}")
    if not annotates(search.builder, env):
        print("note: docker without buildx writes no annotations; the image's labels alone name what is in it")
    return _facts(search.builder, built.image_digest, "") | {"base_digest": base.digest}


def _base(package: Package, env: Mapping[str, str]) -> Base:
    base = resolve(package.base, env)
    if base.digest is None:
        print(
            f"WARNING: package.base={package.base} is a tag, and what it means today is not known ({base.reason}); the "
            "builder takes what it finds under that name. Name the base by digest, as in name@sha256:…, to pin it",
            file=sys.stderr,
            flush=True,
        )
    elif base.name != package.base:
        print(f"base {package.base} is {base.name}", flush=True)
    return base


def _work(order: Order, folder: Path, base: Base | None = None) -> Work:
    """The base is on record as OCI has it."""
    if base is None or base.digest is None:
        return Work(order.image, folder / "context", order.notes)
    notes = {**order.notes, "org.opencontainers.image.base.digest": base.digest}
    return Work(order.image, folder / "context", notes, base.name)


def _without_image(builder: str | None, reason: str, order: Order) -> dict[str, Any]:
    by = builder or "docker"
    argv = build_argv(by, _work(order, order.final), {}, annotated=by != "docker")
    print(f"no image was built; to build it by hand: {shlex.join(argv)}", flush=True)
    return _facts(builder, None, reason)


def _facts(builder: str | None, digest: str | None, reason: str) -> dict[str, Any]:
    return {"builder": builder, "image_digest": digest, "reason": reason, "reference": None, "base_digest": None}


def _look_inside(builder: str, order: Order, env: Mapping[str, str]) -> list[Installed]:
    archive = order.folder / ".image.tar"
    try:
        save(builder, order.image, archive, env)
        return read_image(archive)
    finally:
        archive.unlink(missing_ok=True)


def _write_sbom(order: Order, facts: Mapping[str, Any], installed: list[Installed], bundle: Bundle | None) -> None:
    name, _, tag = order.image.rpartition(":")
    subject = {"name": name, "version": tag, "source": str(facts["source"])}
    subject |= {key: str(facts[key]) for key in ("image_digest", "reference") if facts[key]}
    subject |= {"bundle": bundle.digest} if bundle else {}
    write_json(order.folder / SBOM, document(subject, installed, bundle))
    print(f"{len(installed)} packages in its bill of materials: {order.final / SBOM}", flush=True)
