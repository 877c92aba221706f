"""The package step: the bundle as a container build context, and as images where they can be made.

An image from its build context: built where a builder works, looked into, pushed; what is on record of it.

The image of the training pods: made of a project as it stands, beside its runs, and used until either changes.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k8s.images.build import (
    Recipe,
    Work,
    annotates,
    build,
    build_argv,
    content_of,
    find_builder,
    push,
    save,
    training_annotations,
    write_context,
    write_training_context,
)
from k8s.images.contents import Package as Installed
from k8s.images.contents import document, pinned, read_image
from k8s.images.modelcar import ModelcarBase, bundle_annotations, write_modelcar
from k8s.images.oci_layout import Layout
from k8s.images.registry import Base, Repository, parse, resolve
from k8s.images.registry_login import login_of
from pipeline.contract.bundle import Bundle
from pipeline.contract.config import Config
from pipeline.contract.errors import ConfigError, GateError, StageError
from pipeline.contract.files import write_json
from pipeline.contract.override import passed_gate
from pipeline.contract.run import Run, run_step
from pipeline.contract.settings.stages import Package
from pipeline.history import Project


def package(run: Run, root: Path) -> None:
    config, bundle = run.config, run.bundle()
    check_verdict(bundle)
    image, partial = image_name(config, bundle), run.partial("package")
    _check_push(config)
    recipe = recipe_of(config.package, root, bundle.signature.runtime.provider == "cuda" or config.deploy.gpus > 0)
    context = write_context(bundle, recipe, partial / "context")
    print(f"build context ready: {run.output('package') / 'context'}, digest {context[:12]}")
    needed = config.deploy.target == "kubernetes" or (config.package.push and config.package.build != "never")
    order = Order(image, partial, run.output("package"), run.log("package"), bundle_annotations(bundle), needed)
    record = {
        "image": image,
        "bundle": bundle.digest,
        "context": context,
        "base": recipe.base,
        "accelerator": recipe.accelerator,
        **make(config, order, recipe.accelerator, bundle, os.environ),
        "modelcar": _modelcar(config, bundle, run, os.environ) if config.package.modelcar else None,
    }
    write_json(partial / "image.json", record)


def check_verdict(bundle: Bundle) -> None:
    """A rejected model goes no further, even when its bundle was made by hand."""
    verdict = bundle.manifest.verdict
    if not passed_gate(verdict):
        raise GateError(
            f"{bundle.path}: its verdict is {verdict!r}; only pass, no-baseline or overridden is packaged "
            "(`pipe gate override RUN` goes past a verdict, on record)"
        )


def image_name(config: Config, bundle: Bundle) -> str:
    """Tagged by what is inside, so that a tag never moves."""
    return f"{base_name(config)}:{bundle.digest[:12]}"


def _check_push(config: Config) -> None:
    if config.package.push and config.package.build == "never" and not config.package.modelcar:
        raise ConfigError("package.push: there is nothing to push with package.build=never; set package.modelcar=true")


def _modelcar(config: Config, bundle: Bundle, run: Run, env: Mapping[str, str]) -> dict[str, Any]:
    """Needs no builder; the digest is known before any registry has seen it."""
    name = f"{base_name(config)}-modelcar:{bundle.digest[:12]}"
    reference, base = parse(name), None
    if config.package.modelcar_base:
        below = parse(config.package.modelcar_base)
        base = ModelcarBase(below, Repository(below, login_of(below.host, env)))
    directory = run.partial("package") / "modelcar"
    index = write_modelcar(bundle, directory, name, base)
    record = {"image": name, "digest": index.digest, "reference": None, "uri": None}
    print(f"modelcar ready: {run.output('package') / 'modelcar'}, {index.digest}", flush=True)
    if config.package.push:
        repository = Repository(reference, login_of(reference.host, env))
        pushed = reference.at(repository.push(Layout(directory), index.digest, reference.tag))
        record |= {"reference": pushed, "uri": f"oci://{pushed}"}
        print(f"pushed {pushed}; KServe's storageUri: {record['uri']}", flush=True)
    return record


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


_FOLDER = "images"


def package_training(
    project: Project, config: Config, env: Mapping[str, str], say: Callable[[str], None]
) -> dict[str, Any]:
    """Tagged by what its context holds: our source, the project's, and the versions of what both need."""
    content = content_of(project.root, (config.task, config.codec), config.package.include)
    if content.missing:
        say(f"note: not installed here, and so not in the image: {', '.join(content.missing)}")
    recipe = recipe_of(config.package, project.root, config.train.device == "cuda")
    name = f"{base_name(config)}-train"
    partial = project.runs / _FOLDER / "train.partial"
    context = write_training_context(config.name, project.root, content, recipe, partial / "context")
    final = partial.with_name(f"train-{context[:12]}")
    earlier = _earlier(final, push=config.package.push)
    if earlier is not None:
        say(f"unchanged: {earlier['image']}")
        shutil.rmtree(partial)
        return earlier
    order = Order(
        f"{name}:{context[:12]}", partial, final, None, training_annotations(config.name, content), needed=True
    )
    record = {"image": order.image, "project": content.digest, "context": context, "base": recipe.base}
    record |= {"accelerator": recipe.accelerator, **make(config, order, recipe.accelerator, None, env)}
    write_json(partial / "image.json", record)
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    for built in final.parent.glob("train-*/context"):  # of what was made before, its record is enough
        if built.parent != final:
            shutil.rmtree(built)
    say(f"train.image={record['reference'] or record['image']}")
    return record


def _earlier(final: Path, push: bool) -> dict[str, Any] | None:
    """What was made of the very same context, if it went as far as is asked for now."""
    path = final / "image.json"
    if not path.is_file():
        return None
    record: dict[str, Any] = json.loads(path.read_text())
    return record if record["image_digest"] and (record["reference"] or not push) else None


if __name__ == "__main__":
    sys.exit(run_step("package", package, sys.argv[1:]))
