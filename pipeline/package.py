"""The package step: the bundle as a container build context, and as an image where a builder works."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from k8s.builder import Built, build, build_argv, find_builder
from k8s.context import write_context
from pipeline.spec.bundle import Bundle
from pipeline.spec.config import Config
from pipeline.spec.errors import ConfigError, GateError, StageError
from pipeline.spec.files import write_json
from pipeline.spec.run import Run
from pipeline.spec.step import run_step


def package(run: Run, root: Path) -> None:  # noqa: ARG001 - every step is called alike; this one needs no project
    config, bundle = run.config, run.bundle()
    check_verdict(bundle)
    record: dict[str, Any] = {
        "image": image_name(config, bundle),
        "bundle": bundle.digest,
        "context": write_context(bundle, config.package.base, run.partial("package") / "context"),
        "base": config.package.base,
    }
    print(f"build context ready: {run.output('package') / 'context'}, digest {record['context'][:12]}")
    built = _build(run, config, record["image"], os.environ)
    write_json(run.partial("package") / "image.json", {**record, **built})


def check_verdict(bundle: Bundle) -> None:
    """A rejected model goes no further, even when its bundle was made by hand."""
    verdict = bundle.manifest.verdict
    if verdict not in ("pass", "no-baseline") and not verdict.startswith("forced"):
        raise GateError(
            f"{bundle.path}: its verdict is {verdict!r}; only pass, no-baseline or forced is packaged "
            "(evaluate.force_reason forces it, on record)"
        )


def image_name(config: Config, bundle: Bundle) -> str:
    """Tagged by what is inside, so that a tag never moves."""
    name = config.package.image or config.name
    if "@" in name or ":" in name.rpartition("/")[2]:
        raise ConfigError(f"package.image: {name!r} has a tag; give the name alone, the bundle's digest is the tag")
    return f"{name}:{bundle.digest[:12]}"


def _build(run: Run, config: Config, image: str, env: Mapping[str, str]) -> dict[str, Any]:
    """What image.json says of the build; raises where the road may not go on without an image."""
    if config.package.build == "never":
        return _without_image(None, "package.build is never", run, image)
    search = find_builder(config.package.builder, env)
    if search.builder is None:
        if config.package.build == "require":
            raise StageError(f"no container builder works: {search.reason}; install one, or set package.build=auto")
        return _without_image(None, f"no container builder works: {search.reason}", run, image)
    partial = run.partial("package")
    print(f"building {image} with {search.builder}", flush=True)
    built = build(search.builder, image, partial / "context", partial / ".image-id", env)
    if built.image_digest is None:
        return _failed(run, config, image, search.builder, built)
    print(f"built {image}, {built.image_digest}")
    return {"builder": search.builder, "image_digest": built.image_digest, "reason": ""}


def _failed(run: Run, config: Config, image: str, builder: str, built: Built) -> dict[str, Any]:
    reason = f"{builder} could not build {image}: {built.tail[-1]}; its whole output is in {run.log('package')}"
    if config.package.build == "require" or config.deploy.target == "kubernetes":
        raise StageError(f"{reason}; package.build=never goes on without an image")
    print(f"WARNING: {reason}; its last lines:", file=sys.stderr)
    for line in built.tail:
        print(f"  {line}", file=sys.stderr)
    return _without_image(builder, reason, run, image)


def _without_image(builder: str | None, reason: str, run: Run, image: str) -> dict[str, Any]:
    command = shlex.join(build_argv(builder or "docker", image, run.output("package") / "context", {}))
    print(f"no image was built: {reason}\nto build it by hand: {command}", flush=True)
    return {"builder": builder, "image_digest": None, "reason": reason}


if __name__ == "__main__":
    sys.exit(run_step("package", package, sys.argv[1:]))
