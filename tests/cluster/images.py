"""Bundles and images that the suite deploys: `python -m tests.cluster.images NAME` builds them and prints their names.

All bundles have the same model, which doubles its input. `slow` gives the right answers, but later than `stable`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path

from k8s.images import build
from k8s.images.modelcar import bundle_annotations
from pipeline.contract.bundle import Bundle
from pipeline.system.sources import SOURCE_ROOT
from tests.k8s import doubling_bundle

NAME = doubling_bundle.NAME
PAUSE_SECONDS = {"stable": 0.0, "candidate": 0.0, "slow": 0.5}
_TAG_DIGITS = 12
BASE_IMAGE = "python:3.11-slim"


def make_bundle(directory: Path, version: str) -> Bundle:
    """Write a bundle; the same version has the same digest wherever it is written."""
    return doubling_bundle.make_bundle(directory, card=f"{NAME} ({version})", pause_seconds=PAUSE_SECONDS[version])


def image_name(name: str, bundle: Bundle) -> str:
    return f"{name}:{bundle.digest[:_TAG_DIGITS]}"


def build_images(name: str) -> None:
    """Build all images; only their names go to standard output."""
    builder, problems = build.find_builder("auto", os.environ)
    if builder is None:
        raise SystemExit(f"no image builder: {problems}")
    wheels = SOURCE_ROOT / "wheels"
    recipe = build.Recipe(BASE_IMAGE, "cpu", wheels if wheels.is_dir() else None)
    with tempfile.TemporaryDirectory() as folder:
        for version in PAUSE_SECONDS:
            bundle = make_bundle(Path(folder, version, "bundle"), version)
            context, image = Path(folder, version, "context"), image_name(name, bundle)
            build.write_context(bundle, recipe, context)
            request = build.BuildRequest(image, context, bundle_annotations(bundle))
            with contextlib.redirect_stdout(sys.stderr):
                digest, last = build.build(builder, request, Path(folder, version, "id"), os.environ)
            if digest is None:
                raise SystemExit(f"{image}: {last}")
            print(image)


if __name__ == "__main__":
    build_images(*sys.argv[1:])
