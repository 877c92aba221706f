"""The ConfigMap with the options of the service, which can change without a new image."""

from __future__ import annotations

import math
from typing import Any

from k8s.objects.kustomize import Object
from k8s.objects.manifests import MAX_LABEL, fit_name
from pipeline.contract.bundle import Bundle
from pipeline.contract.config import Config
from pipeline.contract.errors import ConfigError
from pipeline.contract.files import digest_mapping
from pipeline.contract.settings.access import OPEN_ACCESS, Access
from pipeline.contract.settings.stages import service_view_options

OPTIONS_ANNOTATION = "pipe-road/options"
SIGNATURE_KEYS = "SIGNATURE_KEYS"  # public keys, one of which must have signed the bundle
_FOLDER = "/signature-keys"


def fill_config_map(item: Object, config: Config, bundle: Bundle, access: Access = OPEN_ACCESS) -> None:
    """Fill in the options; an empty one means the value in the bundle. `deploy.environment` overrides and adds."""
    data: dict[str, str] = item["data"]
    # By default ONNX Runtime would start a thread for each CPU of the node, whatever the pod's limits.
    data["THREADS"] = "" if bundle.signature.runtime.threads else str(_whole_cpus(config.deploy.cpu))
    environment = config.deploy.environment
    if reserved := sorted(name for name in environment if name in ("LOG_FORMAT", "LOG_REQUESTS", SIGNATURE_KEYS)):
        raise ConfigError(f"deploy.environment.{reserved[0]}: is set from the serve section; leave it out here")
    for name in sorted(data.keys() & environment.keys()):
        _check_option(name, environment[name])
    if access.trust is not None:
        data[SIGNATURE_KEYS] = access.trust.lines()
    data["LOG_REQUESTS"] = f"{config.serve.log_requests:g}"
    item["data"] = dict(sorted({**data, **environment}.items()))


def config_map_name(config: Config) -> str:
    return fit_name(f"{config.name}-options", MAX_LABEL)


def mount_signature_keys(pod: Object, config: Config) -> None:
    """Mount the public keys as a file, from which the service reads them."""
    items = [{"key": SIGNATURE_KEYS, "path": "keys"}]
    pod["volumes"].append({"name": "signature-keys", "configMap": {"name": config_map_name(config), "items": items}})
    container = pod["containers"][0]
    container["volumeMounts"].append({"name": "signature-keys", "mountPath": _FOLDER, "readOnly": True})
    container.setdefault("args", []).append(f"--require-signature={_FOLDER}/keys")


def refer_to_config_map(container: Object, name: str, config: Config) -> None:
    """Let the pods read the ConfigMap; flags without a value cannot come from it and become arguments."""
    container["envFrom"][0]["configMapRef"]["name"] = name
    container["args"] += [word for word in service_view_options(config.serve) if word == "--no-page"]


def options_digest(item: Object) -> str:
    """Return a digest for the pods' annotations: a change of the ConfigMap then rolls out like a new image."""
    data: dict[str, Any] = item["data"]
    return digest_mapping(data)[:16]


def _whole_cpus(quantity: str) -> int:
    cpus = float(quantity[:-1]) / 1000 if quantity.endswith("m") else float(quantity)
    return max(1, math.ceil(cpus))


def _check_option(name: str, text: str) -> None:
    """Check an option as the service does at its start, where the error would be hard to find."""
    whole = name not in ("BATCH_DELAY_MS", "DEADLINE_SECONDS")
    minimum = 0 if name == "THREADS" or not whole else 1
    try:
        valid = not text or minimum <= (int(text) if whole else float(text)) < math.inf
    except ValueError:
        valid = False
    if not valid:
        kind = "a whole number" if whole else "a number"
        raise ConfigError(
            f"deploy.environment.{name}: {text!r} is not {kind} of at least {minimum}; empty: the bundle's value"
        )
