"""What may change without a new image: options and variables of the service, in a ConfigMap beside the pods."""

from __future__ import annotations

import math
from typing import Any

from k8s.objects.kustomize import Object
from k8s.objects.manifests import LABEL, fitting
from pipeline.contract.bundle import Bundle
from pipeline.contract.config import Config
from pipeline.contract.errors import ConfigError
from pipeline.contract.files import digest_mapping
from pipeline.contract.settings.access import ANYBODY, Access
from pipeline.contract.settings.stages import watching

OPTIONS_ANNOTATION = "pipe-road/options"
KEYS = "SIGNATURE_KEYS"  # one of which has signed the bundle
_FOLDER = "/signature-keys"


def fill(item: Object, config: Config, bundle: Bundle, entry: Access = ANYBODY) -> None:
    """The ConfigMap's data; OTEL_ variables are read by the service itself.

    What is empty there is the bundle's to say, unless `deploy.environment` says otherwise.
    """
    data: dict[str, str] = item["data"]
    # ONNX Runtime would take a thread for each CPU of the node, whatever part of it the pod was given.
    data["THREADS"] = "" if bundle.signature.runtime.threads else str(_whole_cpus(config.deploy.cpu))
    given = config.deploy.environment
    if taken := sorted(name for name in given if name in ("LOG_FORMAT", "LOG_REQUESTS", KEYS)):
        raise ConfigError(f"deploy.environment.{taken[0]}: is set from the serve section; leave it out here")
    for name in sorted(data.keys() & given.keys()):
        _check(name, given[name])
    if entry.trust is not None:
        data[KEYS] = entry.trust.lines()
    data["LOG_REQUESTS"] = f"{config.serve.log_requests:g}"
    item["data"] = dict(sorted({**data, **given}.items()))


def name_of(config: Config) -> str:
    return fitting(f"{config.name}-options", LABEL)


def mount_keys(pod: Object, config: Config) -> None:
    """As a file, which is what the service reads them from."""
    items = [{"key": KEYS, "path": "keys"}]
    pod["volumes"].append({"name": "signature-keys", "configMap": {"name": name_of(config), "items": items}})
    container = pod["containers"][0]
    container["volumeMounts"].append({"name": "signature-keys", "mountPath": _FOLDER, "readOnly": True})
    container.setdefault("args", []).append(f"--require-signature={_FOLDER}/keys")


def refer(container: Object, name: str, config: Config) -> None:
    """The pods read it when they start; a flag without a value cannot come from there."""
    container["envFrom"][0]["configMapRef"]["name"] = name
    container["args"] += [word for word in watching(config.serve) if word == "--no-page"]


def digest(item: Object) -> str:
    """On the pods, so that a change of the ConfigMap rolls out as a new image does."""
    data: dict[str, Any] = item["data"]
    return digest_mapping(data)[:16]


def _whole_cpus(quantity: str) -> int:
    cpus = float(quantity[:-1]) / 1000 if quantity.endswith("m") else float(quantity)
    return max(1, math.ceil(cpus))


def _check(name: str, text: str) -> None:
    """As the service does when it starts, where nobody looks."""
    whole = name not in ("BATCH_DELAY_MS", "DEADLINE_SECONDS")
    least = 0 if name == "THREADS" or not whole else 1
    try:
        fits = not text or least <= (int(text) if whole else float(text)) < math.inf
    except ValueError:
        fits = False
    if not fits:
        kind = "a whole number" if whole else "a number"
        raise ConfigError(f"deploy.environment.{name}: {text!r} is not {kind} from {least} on; empty: the bundle says")
