"""The manifests that lie beside this module: loaded as they stand, named and labelled for one model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from k8s.kustomize import Object as Object
from k8s.kustomize import build
from pipeline.spec.errors import ConfigError

HTTP_PORT = 8080
GRPC_PORT = 8081
BUNDLE_ANNOTATION = "pipe-road/bundle"
GPU = "nvidia.com/gpu"

_HERE = Path(__file__).resolve().parent
_IMAGE = re.compile(r"^[a-z0-9][\w.\-/:]*?(?::(?P<tag>\w[\w.\-]{0,127}))?(?P<digest>@sha256:[0-9a-f]{64})?$", re.ASCII)
_CONTENT_TAG = re.compile(r"[0-9a-f]{12}")  # the beginning of the digest of a bundle or of a build context


def load(family: str, layers: Iterable[str] = ()) -> dict[str, Object]:
    """The objects of a family's base by their kind, with components laid on; or of a folder that stands alone."""
    place = _HERE / family
    base = place if (place / "kustomization.yaml").is_file() else place / "base"
    return {item["kind"]: item for item in build(base, [place / "components" / name for name in layers])}


def identity(name: str, component: str) -> dict[str, str]:
    """The labels that select a model's pods; they never change between versions."""
    return {"app.kubernetes.io/name": name, "app.kubernetes.io/component": component}


def describe(item: Object, name: str, namespace: str, labels: Mapping[str, str], notes: Mapping[str, str]) -> None:
    """Give an object its name, place, labels and annotations."""
    metadata = item["metadata"]
    metadata["name"] = name
    metadata["namespace"] = namespace
    metadata["labels"] = {**metadata.get("labels", {}), **labels}
    if annotations := {**metadata.get("annotations", {}), **notes}:
        metadata["annotations"] = annotations


def label(item: Object) -> str:
    """An object as kubectl names it."""
    return f"{item['kind'].lower()}/{item['metadata']['name']}"


def check_image(image: str) -> None:
    """An image must mean one thing for ever: a fixed tag or a digest."""
    match = _IMAGE.fullmatch(image)
    if match is None:
        raise ConfigError(f"image {image!r}: not a container image name; write it as name:tag or name@sha256:…")
    if match["digest"] is None and match["tag"] in (None, "latest"):
        raise ConfigError(f"image {image!r}: `latest` means another image every day; name a fixed tag or a digest")


def check_pinned(image: str, word: str) -> None:
    """What goes to a cluster is named by what is inside: by digest, or by the tag `pipe package` makes of one."""
    check_image(image)
    match = _IMAGE.fullmatch(image)
    assert match is not None
    if match["digest"] is None and not _CONTENT_TAG.fullmatch(match["tag"]):
        raise ConfigError(
            f"{word}: {image!r} is named by a tag, which may mean another image tomorrow; name it by digest, as in "
            "name@sha256:… (`pipe package --push` gives it)"
        )
