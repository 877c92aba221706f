"""The package step: the bundle as a container build context, and as images where they can be made."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from k8s.context import write_context
from k8s.login import login_of
from k8s.modelcar import Base, notes_of, write_modelcar
from k8s.oci import Layout
from k8s.reference import parse
from k8s.registry import Repository
from pipeline.images import Order, base_name, make, recipe_of
from pipeline.spec.bundle import Bundle
from pipeline.spec.config import Config
from pipeline.spec.errors import ConfigError, GateError
from pipeline.spec.files import write_json
from pipeline.spec.override import passed_gate
from pipeline.spec.run import Run
from pipeline.spec.step import run_step


def package(run: Run, root: Path) -> None:
    config, bundle = run.config, run.bundle()
    check_verdict(bundle)
    image, partial = image_name(config, bundle), run.partial("package")
    _check_push(config)
    recipe = recipe_of(config.package, root, bundle.signature.runtime.provider == "cuda" or config.deploy.gpus > 0)
    context = write_context(bundle, recipe, partial / "context")
    print(f"build context ready: {run.output('package') / 'context'}, digest {context[:12]}")
    needed = config.deploy.target == "kubernetes" or (config.package.push and config.package.build != "never")
    order = Order(image, partial, run.output("package"), run.log("package"), notes_of(bundle), needed)
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
        base = Base(below, Repository(below, login_of(below.host, env)))
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


if __name__ == "__main__":
    sys.exit(run_step("package", package, sys.argv[1:]))
