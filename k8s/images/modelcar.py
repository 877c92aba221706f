"""Modelcars: a bundle as a data-only image for KServe's `oci://`, reproducible and made without a builder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from k8s.images.oci_layout import LAYER, Blob, Layer, Layout
from k8s.images.registry import Reference, Repository
from pipeline.contract.bundle import Bundle
from pipeline.system.errors import ConfigError, StageError

MODELS = "models"  # where KServe expects the model in the image
ARCHITECTURES = ("amd64", "arm64")  # data has none, but nodes pull the image of their own


def bundle_annotations(bundle: Bundle) -> dict[str, str]:
    """Return the annotations of every image of a bundle."""
    return {
        "org.opencontainers.image.title": bundle.name,
        "org.opencontainers.image.version": bundle.digest[:12],
        "pipe-road.bundle": bundle.digest,
        "pipe-road.verdict": bundle.manifest.verdict,
    }


def write_modelcar(bundle: Bundle, directory: Path, reference: str, base: ModelcarBase | None = None) -> Blob:
    """Write an OCI layout with an image for each architecture; all have the same data layer."""
    layout = Layout.make(directory)
    data = layout.add_layer(bundle.path, MODELS)
    annotations = bundle_annotations(bundle)
    images = {}
    for architecture in ARCHITECTURES:
        base_layers = base.layers(architecture, layout) if base else []
        if base and not base_layers:
            continue
        images[architecture] = layout.add_image(
            [*base_layers, data], architecture, annotations, base.run if base else {}
        )
    if not images:
        raise StageError(f"package.modelcar: has no image for {' or '.join(ARCHITECTURES)}")
    index = layout.add_index(images, annotations)
    layout.name(index, reference)
    return index


class ModelcarBase:
    """A base image for modelcars: KServe's sidecar mode starts `sh` in the image, which data alone lacks."""

    run: Mapping[str, Any] = {"User": "10001:10001"}

    def __init__(self, reference: Reference, repository: Repository) -> None:
        if not reference.digest:
            raise ConfigError("package.modelcar: name it by digest, as in host/name@sha256:…; a tag may move")
        self._digest = reference.digest
        self._repository = repository

    def layers(self, architecture: str, layout: Layout) -> list[Layer]:
        """Fetch the base's layers into the layout; none if the base has no image for this architecture."""
        manifest = self._manifest(architecture)
        if manifest is None:
            return []
        config = layout.file(manifest["config"]["digest"])
        self._repository.fetch(manifest["config"]["digest"], config)
        config_body = json.loads(config.read_bytes())
        config.unlink()  # replaced by ours
        if config_body.get("architecture") != architecture:
            return []
        pairs = zip(manifest["layers"], config_body["rootfs"]["diff_ids"], strict=True)
        return [self._layer(part, diff_id, layout) for part, diff_id in pairs]

    def _manifest(self, architecture: str) -> dict[str, Any] | None:
        root = self._repository.manifest(self._digest)
        if "manifests" not in root:
            return root
        platform = {"os": "linux", "architecture": architecture}
        for entry in root["manifests"]:
            if platform.items() <= entry.get("platform", {}).items():
                return self._repository.manifest(entry["digest"])
        return None

    def _layer(self, part: Mapping[str, Any], diff_id: str, layout: Layout) -> Layer:
        if not layout.file(part["digest"]).exists():
            self._repository.fetch(part["digest"], layout.file(part["digest"]))
        # Docker's own name is the same tar.
        media_type = LAYER + ("+gzip" if part["mediaType"].endswith("gzip") else "")
        return Layer(Blob(media_type, part["digest"], part["size"]), diff_id)
