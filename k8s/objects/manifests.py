"""The manifests that lie beside this module: loaded as they stand, named and labelled for one model.

Names that Kubernetes takes: what is too long or has strange letters is changed the same way every time.

Objects as files: one YAML each and a kustomization that lists them, byte for byte the same every time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from k8s.objects.kustomize import Object as Object
from k8s.objects.kustomize import build
from pipeline.contract.errors import ConfigError
from pipeline.contract.files import digest_bytes, write_atomic

HTTP_PORT = 8080
GRPC_PORT = 8081
BUNDLE_ANNOTATION = "pipe-road/bundle"
GPU = "nvidia.com/gpu"

_HERE = Path(__file__).resolve().parents[1] / "manifests"
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


LABEL = 63  # DNS-1035: a Service, a host name, the value of a label
JOB = 52  # with `-` and a pod's number, and the five letters that end a pod's name
JOBSET = 45  # with `-node-0-9999-`, and those letters

_HASH = 8


def fitting(text: str, limit: int = LABEL) -> str:
    """A DNS-1035 label: small letters, digits and dashes, a letter first.

    A name that fits stays as it is. Any other gets a hash of the whole, so that two names never become one.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if plain and not plain[0].isalpha():
        plain = f"x-{plain}"
    if plain and plain == text and len(plain) <= limit:
        return plain
    head = plain[: limit - _HASH - 1].rstrip("-") or "x"
    return f"{head}-{digest_bytes(text.encode())[:_HASH]}"


_KUSTOMIZATION = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}


def write(objects: Iterable[Mapping[str, Any]], directory: Path) -> list[Path]:
    """Every file written, sorted."""
    directory.mkdir(parents=True, exist_ok=True)
    clear(directory)
    texts = {f"{item['kind']}-{item['metadata']['name']}.yaml".lower(): _text(item) for item in objects}
    texts["kustomization.yaml"] = _text({**_KUSTOMIZATION, "resources": sorted(texts)})
    for name, text in texts.items():
        write_atomic(directory / name, text)
    return [directory / name for name in sorted(texts)]


def clear(directory: Path) -> None:
    """Take away what an earlier rendering listed: a file that is in no kustomization any more would only mislead."""
    file = directory / "kustomization.yaml"
    listed = yaml.safe_load(file.read_text())["resources"] if file.is_file() else []
    for name in listed:
        if Path(name).name == name:  # ours are all beside it
            (directory / name).unlink(missing_ok=True)


def write_documents(files: Mapping[str, Iterable[Mapping[str, Any]]], directory: Path) -> list[Path]:
    """What an engine reads as one file: it is submitted, not applied, so that no kustomization lists it."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, documents in sorted(files.items()):
        write_atomic(directory / name, "---\n".join(_text(item) for item in documents))
    return [directory / name for name in sorted(files)]


def _text(value: Mapping[str, Any]) -> str:
    """Keys in the order people read them: apiVersion, kind, metadata, spec."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=120)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - the overridden method's signature
        """Labels shared by several objects are written out each time, not as YAML anchors."""
        return True
