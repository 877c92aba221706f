"""The package step: write a container build context for the bundle, and build and push images where possible.

The image of the training pods is built the same way from the project, and kept in `runs/images/`. The provenance of an
image is for `cosign attest`.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from k8s.images.build import (
    BuildRequest,
    Recipe,
    build,
    build_argv,
    find_builder,
    project_content,
    push,
    supports_annotations,
    training_annotations,
    write_context,
    write_training_context,
)
from k8s.images.contents import bill_of_materials, image_provenance, packages_from_pins
from k8s.images.modelcar import ModelcarBase, bundle_annotations, write_modelcar
from k8s.images.oci_layout import Layout
from k8s.images.registry import BaseImage, Repository, find_login, parse_reference, resolve_base_image
from pipeline.contract.bundle import NOT_EVALUATED, PROVENANCE, Bundle, check_gate
from pipeline.contract.config import Config
from pipeline.contract.run import Run, step_main
from pipeline.contract.settings.stages import WHEELS_FOLDER, Package
from pipeline.history import Project
from pipeline.system.errors import ConfigError, StageError
from pipeline.system.files import read_object, write_json
from pipeline.system.processes import exit_by_exception

SBOM = "sbom.cdx.json"
_IMAGES_FOLDER = "images"  # of the runs folder: training images


def package(run: Run, root: Path) -> None:
    config, bundle = run.config, run.bundle()
    if config.deploy.on_cluster or bundle.manifest.verdict != NOT_EVALUATED:
        check_gate(bundle.manifest.verdict, str(bundle.path))
    image, partial = image_name(config, bundle), run.partial("package")
    if config.package.push and config.package.builder == "none" and not config.package.modelcar:
        raise ConfigError(
            "package.push: there is nothing to push with package.builder=none; set package.modelcar=scratch"
        )
    recipe = recipe_of(
        config.package, root, bundle.signature.runtime.provider in ("cuda", "tensorrt") or config.deploy.gpus > 0
    )
    context = write_context(bundle, recipe, partial / "context", config.serve.sample_packages)
    print(f"build context ready: {run.output('package') / 'context'}, digest {context[:12]}")
    is_required = config.deploy.on_cluster or (config.package.push and config.package.builder != "none")
    request = ImageRequest(
        image, partial, run.output("package"), run.log("package"), bundle_annotations(bundle), is_required
    )
    record = {
        "image": image,
        "bundle": bundle.digest,
        "context": context,
        "base": recipe.base,
        "accelerator": recipe.accelerator,
        **make_image(config, request, recipe.accelerator, bundle, os.environ),
        "modelcar": _modelcar(config, bundle, run, os.environ) if config.package.modelcar else None,
    }
    materials = {"context": context, record["base"]: record["base_digest"]}
    write_json(partial / PROVENANCE, image_provenance(bundle, materials, run.id))
    run.bundle()  # raises where files were replaced while they were packaged
    write_json(partial / "image.json", record)


def image_name(config: Config, bundle: Bundle) -> str:
    """Tag the image by the bundle's digest, so that a tag never moves."""
    return f"{base_name(config)}:{bundle.digest[:12]}"


def _modelcar(config: Config, bundle: Bundle, run: Run, env: Mapping[str, str]) -> dict[str, Any]:
    """Write the bundle as a data-only image, which needs no builder, and push it if configured."""
    name = f"{base_name(config)}-modelcar:{bundle.digest[:12]}"
    reference, base = parse_reference(name), None
    if config.package.modelcar != "scratch":
        base_reference = parse_reference(config.package.modelcar)
        base = ModelcarBase(base_reference, Repository(base_reference, find_login(base_reference.host, env)))
    directory = run.partial("package") / "modelcar"
    index = write_modelcar(bundle, directory, name, base)
    materials = {config.package.modelcar: base_reference.digest if base else None}
    write_json(run.partial("package") / f"modelcar-{PROVENANCE}", image_provenance(bundle, materials, run.id))
    record = {"image": name, "digest": index.digest, "reference": None, "uri": None}
    print(f"modelcar ready: {run.output('package') / 'modelcar'}, {index.digest}", flush=True)
    if config.package.push:
        repository = Repository(reference, find_login(reference.host, env))
        pushed_reference = reference.at(repository.push(Layout(directory), index.digest, reference.tag))
        record |= {"reference": pushed_reference, "uri": f"oci://{pushed_reference}"}
        print(f"pushed {pushed_reference}; KServe's storageUri: {record['uri']}", flush=True)
    return record


@dataclass(frozen=True)
class ImageRequest:
    """An image to build, and where its files go."""

    image: str  # with its tag
    folder: Path  # contains `context`; the bill of materials goes here
    final: Path  # name of the folder after the step has ended
    log: Path | None  # has the builder's output
    annotations: Mapping[str, str]
    needed: bool  # without it, the step fails


def recipe_of(package: Package, root: Path, cuda: bool) -> Recipe:
    wheels = root / WHEELS_FOLDER
    return Recipe(package.base_image, "gpu" if cuda else "cpu", wheels if any(wheels.glob("*.whl")) else None)


def base_name(config: Config) -> str:
    name = config.package.image or f"localhost/{config.name}"  # as podman calls it; docker takes every name
    if "@" in name or ":" in name.rpartition("/")[2]:
        raise ConfigError(f"package.image: {name!r} has a tag; remove it, the digest of the content is the tag")
    if config.package.push and "/" not in config.package.image:
        raise ConfigError(
            f"package.push: package.image names no registry; set it, as in registry.example/{config.name}"
        )
    return name


def make_image(
    config: Config, request: ImageRequest, accelerator: str, bundle: Bundle | None, env: Mapping[str, str]
) -> dict[str, Any]:
    """Build the image, list its packages and push it; return the entries of image.json."""
    built = _build(config.package, request, env)
    if config.package.push and built["image_digest"] is not None:
        digest = push(built["builder"], request.image, request.folder / ".pushed", env)
        built["reference"] = parse_reference(request.image).at(digest)
        print(f"pushed {built['reference']}", flush=True)
    _write_sbom(request, built, accelerator, bundle)
    return {**built, "sbom": SBOM}


def _build(package: Package, request: ImageRequest, env: Mapping[str, str]) -> dict[str, Any]:
    """Build the image; raise where it is needed and cannot be built."""
    is_required = request.needed or package.builder != "auto"
    if package.builder == "none":
        return _without_image(None, "package.builder is none", request)
    builder, problems = find_builder(package.builder, env)
    if builder is None:
        reason = f"no container builder works: {problems}"
        if is_required:
            raise StageError(f"{reason}; install one, or set package.builder=auto")
        return _without_image(None, reason, request)
    base = _base(package, env)
    print(f"building {request.image} with {builder}", flush=True)
    digest, last = build(builder, _build_request(request, request.folder, base), request.folder / ".image-id", env)
    if digest is None:
        log_hint = f"; its whole output is in {request.log}" if request.log else ""
        reason = f"{builder} could not build {request.image}: {last}{log_hint}"
        if is_required:
            raise StageError(f"{reason}; package.builder=none continues without an image")
        print(f"WARNING: {reason}", file=sys.stderr)
        return _without_image(builder, reason, request)
    print(f"built {request.image}, {digest}")
    if not supports_annotations(builder, env):
        print("note: docker without buildx writes no annotations; only the labels of the image describe its content")
    return _facts(builder, digest, "") | {"base_digest": base.digest}


def _base(package: Package, env: Mapping[str, str]) -> BaseImage:
    base = resolve_base_image(package.base_image, env)
    if base.digest is None:
        print(
            f"WARNING: package.base_image={package.base_image} is a tag whose digest is unknown ({base.reason}); the "
            "builder uses whatever it finds under that name. Name the base by digest, as in name@sha256:…, to pin it",
            file=sys.stderr,
            flush=True,
        )
    elif base.name != package.base_image:
        print(f"base {package.base_image} is {base.name}", flush=True)
    return base


def _build_request(request: ImageRequest, folder: Path, base: BaseImage | None = None) -> BuildRequest:
    """Return the build, annotated with the base image where its digest is known."""
    if base is None or base.digest is None:
        return BuildRequest(request.image, folder / "context", request.annotations)
    notes = {**request.annotations, "org.opencontainers.image.base.digest": base.digest}
    return BuildRequest(request.image, folder / "context", notes, base.name)


def _without_image(builder: str | None, reason: str, request: ImageRequest) -> dict[str, Any]:
    by = builder or "docker"
    argv = build_argv(by, _build_request(request, request.final), {}, annotated=by != "docker")
    print(f"no image was built; to build it by hand: {shlex.join(argv)}", flush=True)
    return _facts(builder, None, reason)


def _facts(builder: str | None, digest: str | None, reason: str) -> dict[str, Any]:
    return {"builder": builder, "image_digest": digest, "reason": reason, "reference": None, "base_digest": None}


def _write_sbom(request: ImageRequest, facts: Mapping[str, Any], accelerator: str, bundle: Bundle | None) -> None:
    pins = (request.folder / "context" / f"requirements-{accelerator}.txt").read_text().splitlines()
    packages, (name, _, tag) = packages_from_pins(pins), request.image.rpartition(":")
    subject = {"name": name, "version": tag}
    subject |= {key: str(facts[key]) for key in ("image_digest", "reference") if facts[key]}
    subject |= {"bundle": bundle.digest} if bundle else {}
    write_json(request.folder / SBOM, bill_of_materials(subject, packages, bundle))
    print(f"{len(packages)} packages in the bill of materials: {request.final / SBOM}", flush=True)


def package_training(
    project: Project, config: Config, env: Mapping[str, str], report: Callable[[str], None]
) -> dict[str, Any]:
    """Make the image of the training pods, tagged by the digest of its context; reuse one of the same context."""
    content = project_content(project.root, (config.task, config.codec), config.package.include)
    if config.monitor.every:  # its pods read the samples
        content = replace(content, packages=tuple(sorted({*content.packages, *config.serve.sample_packages})))
    if content.missing:
        report(f"note: not installed here and therefore not in the image: {', '.join(content.missing)}")
    recipe = recipe_of(config.package, project.root, config.train.device == "cuda")
    name = f"{base_name(config)}-train"
    partial = project.runs / _IMAGES_FOLDER / "train.partial"
    trackers = config.external_trackers  # pods of a workflow track their own steps
    context = write_training_context(config.name, project.root, content, recipe, partial / "context", trackers)
    final = partial.with_name(f"train-{context[:12]}")
    earlier = _find_earlier_image(final, push=config.package.push)
    if earlier is not None:
        report(f"unchanged: {earlier['image']}")
        shutil.rmtree(partial)
        return earlier
    request = ImageRequest(
        f"{name}:{context[:12]}", partial, final, None, training_annotations(config.name, content), needed=True
    )
    record = {"image": request.image, "project": content.digest, "context": context, "base": recipe.base}
    record |= {"accelerator": recipe.accelerator, **make_image(config, request, recipe.accelerator, None, env)}
    write_json(partial / "image.json", record)
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    for built in final.parent.glob("train-*/context"):  # of older images, only the record is kept
        if built.parent != final:
            shutil.rmtree(built)
    report(f"train.image={record['reference'] or record['image']}")
    return record


def _find_earlier_image(final: Path, push: bool) -> dict[str, Any] | None:
    """Return the record of an image with the same context, if it was built, and pushed where `push` is set."""
    path = final / "image.json"
    if not path.is_file():
        return None
    record: dict[str, Any] = read_object(path)
    return record if record["image_digest"] and (record["reference"] or not push) else None


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, exit_by_exception)  # ends the builder
    sys.exit(step_main("package", package, sys.argv[1:]))
