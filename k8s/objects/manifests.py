"""Load manifests from k8s/manifests as objects, name and label them for one model, fill in options, write files."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from k8s.images.registry import parse_reference
from k8s.objects.kustomize import Object as Object
from k8s.objects.kustomize import build
from pipeline.contract.bundle import Bundle
from pipeline.contract.config import Config
from pipeline.contract.settings.access import OPEN_ACCESS, Access
from pipeline.contract.settings.stages import sampling_options
from pipeline.contract.signature import parse_option
from pipeline.system.errors import ConfigError
from pipeline.system.files import digest_bytes, digest_mapping, write_atomic

HTTP_PORT = 8080
BUNDLE_ANNOTATION = "pipe-road/bundle"
VERSION_ANNOTATION = "pipe-road/version"  # of a workload that `pipe deploy` applied: the number of its version
TRACK_LABEL = "pipe-road/track"  # of a canary and its pods
WORKLOAD_KINDS = ("Deployment", "Rollout", "InferenceService")  # the kinds that run a service
GPU_RESOURCE = "nvidia.com/gpu"

# Longest names, in characters.
MAX_LABEL = 63  # DNS-1035: a Service, a host name, the value of a label
MAX_JOB_NAME = 52  # leaves room for `-`, a pod's number, and the five letters that end a pod's name
MAX_JOBSET_NAME = 45  # leaves room for `-node-0-9999-` and those letters

_MANIFESTS = Path(__file__).resolve().parents[1] / "manifests"
_CONTENT_TAG = re.compile(r"[0-9a-f]{12}")  # the beginning of the digest of a bundle or of a build context
_HASH_CHARACTERS = 8
_KUSTOMIZATION = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}


def load_manifests(folder: str, components: Iterable[str] = ()) -> dict[str, Object]:
    """Build a folder's base, or the folder itself if it has none, with components; return its objects by kind."""
    path = _MANIFESTS / folder
    base = path if (path / "kustomization.yaml").is_file() else path / "base"
    return {item["kind"]: item for item in build(base, [path / "components" / name for name in components])}


def identity_labels(name: str, component: str) -> dict[str, str]:
    """Return the labels that select a model's pods; they never change between versions."""
    return {"app.kubernetes.io/name": name, "app.kubernetes.io/component": component}


def format_selector(labels: Mapping[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in labels.items())


def set_metadata(
    item: Object, name: str, namespace: str, labels: Mapping[str, str], annotations: Mapping[str, str]
) -> None:
    """Set an object's name and namespace, and add labels and annotations."""
    metadata = item["metadata"]
    metadata["name"] = name
    metadata["namespace"] = namespace
    metadata["labels"] = {**metadata.get("labels", {}), **labels}
    if merged := {**metadata.get("annotations", {}), **annotations}:
        metadata["annotations"] = merged


def find_workload(objects: Iterable[Object]) -> Object:
    return next(item for item in objects if item["kind"] in WORKLOAD_KINDS)


def kubectl_name(item: Object) -> str:
    """Return an object's name as kubectl prints it: `deployment/digits`."""
    return f"{item['kind'].lower()}/{item['metadata']['name']}"


def check_image(image: str) -> None:
    """Refuse an image name without a fixed tag or a digest."""
    reference = parse_reference(image)
    if not reference.digest and reference.tag in ("", "latest"):
        raise ConfigError(f"image {image!r}: `latest` means another image every day; name a fixed tag or a digest")


def check_pinned(image: str, setting: str) -> None:
    """Refuse an image that is not named by its content: by digest, or by the tag that `pipe package` derives."""
    check_image(image)
    reference = parse_reference(image)
    if not reference.digest and not _CONTENT_TAG.fullmatch(reference.tag):
        raise ConfigError(
            f"{setting}: {image!r} is named by a tag, which may mean another image tomorrow; name it by digest, as in "
            "name@sha256:… (`pipe package --push` gives it)"
        )


def fit_name(text: str, limit: int = MAX_LABEL) -> str:
    """Return a DNS-1035 label: lower-case letters, digits and dashes, beginning with a letter.

    A valid name stays as it is. Any other gets a hash of the whole name, so that two names never become one.
    """
    label = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if label and not label[0].isalpha():
        label = f"x-{label}"
    if label and label == text and len(label) <= limit:
        return label
    prefix = label[: limit - _HASH_CHARACTERS - 1].rstrip("-") or "x"
    return f"{prefix}-{digest_bytes(text.encode())[:_HASH_CHARACTERS]}"


def write_manifests(objects: Iterable[Mapping[str, Any]], directory: Path) -> list[Path]:
    """Write one YAML file for each object and a kustomization that lists them; return the files, sorted.

    The same objects give the same bytes.
    """
    directory.mkdir(parents=True, exist_ok=True)
    remove_manifests(directory)
    texts = {f"{item['kind']}-{item['metadata']['name']}.yaml".lower(): _to_yaml(item) for item in objects}
    texts["kustomization.yaml"] = _to_yaml({**_KUSTOMIZATION, "resources": sorted(texts)})
    for name, text in texts.items():
        write_atomic(directory / name, text)
    return [directory / name for name in sorted(texts)]


def remove_manifests(directory: Path) -> None:
    """Delete the files that the folder's kustomization lists, so that none is left that no kustomization lists."""
    file = directory / "kustomization.yaml"
    names = yaml.safe_load(file.read_text())["resources"] if file.is_file() else []
    for name in names:
        if Path(name).name == name:  # our files are in the folder itself
            (directory / name).unlink(missing_ok=True)


def write_documents(files: Mapping[str, Iterable[Mapping[str, Any]]], directory: Path) -> list[Path]:
    """Write files of several documents: workflows are submitted, not applied, so no kustomization lists them."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, documents in sorted(files.items()):
        write_atomic(directory / name, "---\n".join(_to_yaml(item) for item in documents))
    return [directory / name for name in sorted(files)]


def _to_yaml(value: Mapping[str, Any]) -> str:
    """Keep the order of the keys: apiVersion, kind, metadata, spec."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=120)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - the overridden method's signature
        """Write labels that several objects share in full, not as YAML anchors."""
        return True


OPTIONS_ANNOTATION = "pipe-road/options"  # of pods: the name of their ConfigMap
ACCESS_ANNOTATION = "pipe-road/access"  # of a ConfigMap: the name of the Secret that is used with it
SIGNATURE_KEYS = "SIGNATURE_KEYS"  # public keys, one of which must have signed the bundle


def fill_config_map(item: Object, config: Config, bundle: Bundle, access: Access = OPEN_ACCESS) -> None:
    """Fill in the options; an empty one means the value in the bundle. `deploy.environment` overrides and adds."""
    data: dict[str, str] = item["data"]
    # By default ONNX Runtime would start a thread for each CPU of the node, whatever the pod's limits.
    data["THREADS"] = "" if bundle.signature.runtime.threads else str(count_threads(config, bundle))
    environment = config.deploy.environment
    if reserved := sorted(name for name in environment if name in ("LOG_FORMAT", "LOG_REQUESTS", SIGNATURE_KEYS)):
        raise ConfigError(f"deploy.environment.{reserved[0]}: is set from the serve section; leave it out here")
    for name in sorted(data.keys() & environment.keys()):
        try:
            parse_option(name.lower(), environment[name])
        except ValueError as error:  # as at the service's start, where it would be hard to find
            raise ConfigError(f"deploy.environment.{name}: {error}; empty: the bundle's value") from None
    if access.trust is not None:
        data[SIGNATURE_KEYS] = access.trust.lines()
    data["LOG_REQUESTS"] = f"{config.serve.log_requests:g}"
    item["data"] = dict(sorted({**data, **environment}.items()))


def name_config_map(item: Object, config: Config, secret: str) -> None:
    """Name the ConfigMap by its content, which never changes, so that each version of the pods keeps its own."""
    item["immutable"] = True
    name = name_by_content(f"{config.name}-options", {**item["data"], ACCESS_ANNOTATION: secret})
    annotations = {ACCESS_ANNOTATION: secret} if secret else {}
    set_metadata(item, name, config.deploy.namespace, identity_labels(config.name, "serving"), annotations)


def name_by_content(prefix: str, content: Mapping[str, str]) -> str:
    return fit_name(f"{prefix}-{digest_mapping(content)[:_HASH_CHARACTERS]}")


def refer_to_config_map(container: Object, name: str, config: Config) -> None:
    """Let the pods read the ConfigMap; flags without a value cannot come from it and become arguments."""
    container["envFrom"][0]["configMapRef"]["name"] = name
    container["args"] += [] if config.serve.page else ["--no-page"]
    container["args"] += [] if (workers := count_workers(config)) == 1 else [f"--workers={workers}"]
    container["args"] += sampling_options(config.serve, None)


def count_workers(config: Config) -> int:
    """Return the processes in a pod; `auto` is the CPU request, as the node's other CPUs belong to other pods."""
    workers = config.serve.workers
    return _whole_cpus(config.deploy.cpu) if workers == "auto" else workers


def count_threads(config: Config, bundle: Bundle) -> int:
    """Return the threads inside one inference of a pod."""
    return bundle.signature.runtime.threads or max(1, _whole_cpus(config.deploy.cpu) // count_workers(config))


def _whole_cpus(quantity: str) -> int:
    return max(1, math.ceil(count_cpus(quantity)))


def count_cpus(quantity: str) -> float:
    return float(quantity[:-1]) / 1000 if quantity.endswith("m") else float(quantity)
