"""A bundle as a data-only image: no builder, no clock, the same bytes everywhere; KServe finds the model in /models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from k8s.images.oci_layout import LAYER, Blob, Layer, Layout
from k8s.images.registry import Reference, Repository
from pipeline.contract.bundle import Bundle
from pipeline.contract.errors import ConfigError, StageError

MODELS = "models"  # where KServe looks in an image that `oci://` names
ARCHITECTURES = ("amd64", "arm64")  # data has none; a node asks for the image of its own


def bundle_annotations(bundle: Bundle) -> dict[str, str]:
    """What every image of a bundle says of itself."""
    return {
        "org.opencontainers.image.title": bundle.name,
        "org.opencontainers.image.version": bundle.digest[:12],
        "pipe-road.bundle": bundle.digest,
        "pipe-road.verdict": bundle.manifest.verdict,
    }


def write_modelcar(bundle: Bundle, directory: Path, reference: str, base: ModelcarBase | None = None) -> Blob:
    """An OCI layout with an image for each architecture; all hold the same layer."""
    layout = Layout.make(directory)
    data = layout.add_layer(bundle.path, MODELS)
    notes = bundle_annotations(bundle)
    images = {}
    for architecture in ARCHITECTURES:
        below = base.layers(architecture, layout) if base else []
        if base and not below:
            continue
        images[architecture] = layout.add_image([*below, data], architecture, notes, base.run if base else {})
    if not images:
        raise StageError(f"package.modelcar: has no image for {' or '.join(ARCHITECTURES)}")
    index = layout.add_index(images, notes)
    layout.name(index, reference)
    return index


class ModelcarBase:
    """An image whose layers come first: KServe's sidecar form starts `sh` in the image, which data alone lacks."""

    run: Mapping[str, Any] = {"User": "10001:10001"}

    def __init__(self, reference: Reference, repository: Repository) -> None:
        if not reference.digest:
            raise ConfigError("package.modelcar: name it by digest, as in host/name@sha256:…; a tag may move")
        self._digest = reference.digest
        self._repository = repository

    def layers(self, architecture: str, layout: Layout) -> list[Layer]:
        """Fetched into the layout; none where the image is for other processors."""
        manifest = self._manifest(architecture)
        if manifest is None:
            return []
        config = layout.file(manifest["config"]["digest"])
        self._repository.fetch(manifest["config"]["digest"], config)
        described = json.loads(config.read_bytes())
        config.unlink()  # ours takes its place
        if described.get("architecture") != architecture:
            return []
        pairs = zip(manifest["layers"], described["rootfs"]["diff_ids"], strict=True)
        return [self._layer(part, diff_id, layout) for part, diff_id in pairs]

    def _manifest(self, architecture: str) -> dict[str, Any] | None:
        root = self._repository.manifest(self._digest)
        if "manifests" not in root:
            return root
        wanted = {"os": "linux", "architecture": architecture}
        for entry in root["manifests"]:
            if wanted.items() <= entry.get("platform", {}).items():
                return self._repository.manifest(entry["digest"])
        return None

    def _layer(self, part: Mapping[str, Any], diff_id: str, layout: Layout) -> Layer:
        if not layout.file(part["digest"]).exists():
            self._repository.fetch(part["digest"], layout.file(part["digest"]))
        media_type = LAYER + (
            "+gzip" if part["mediaType"].endswith("gzip") else ""
        )  # Docker's own name is the same tar
        return Layer(Blob(media_type, part["digest"], part["size"]), diff_id)
