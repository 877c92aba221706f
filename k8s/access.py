"""API keys and TLS on a cluster: one Secret, mounted into the serving pods and never written to a file of ours.

The public keys that bundles are signed with are no secret: they come by the ConfigMap of the options.
"""

from __future__ import annotations

import base64
import shlex
from pathlib import Path

from k8s import options
from k8s.manifest import Object, describe, identity
from pipeline.spec.access import Access
from pipeline.spec.config import Config
from pipeline.spec.errors import ConfigError

_FOLDER = "/access"
_FILES = {"api_keys": "api-keys", "tls_certificate": "tls.crt", "tls_key": "tls.key"}  # by the word that names each


def fill(pod: Object, config: Config, access: Access) -> None:
    """Mount the Secret and point the service to it; probes follow to HTTPS."""
    if access.require_signature:
        options.mount_keys(pod, config)
    inside = {word: f"{_FOLDER}/{file}" for word, file in _FILES.items() if getattr(access, word)}
    if not inside:
        return
    if access.tls_key and config.deploy.mode == "inferenceservice":
        raise ConfigError("serve.tls_certificate: KServe's gateway ends TLS before the pods; leave it and tls_key out")
    container = pod["containers"][0]
    container.setdefault("args", []).extend(Access(**inside).options)
    container["volumeMounts"].append({"name": "access", "mountPath": _FOLDER, "readOnly": True})
    pod["volumes"].append({"name": "access", "secret": {"secretName": _name(config)}})
    if access.tls_key:
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            container[probe]["httpGet"]["scheme"] = "HTTPS"


def secrets(config: Config, access: Access) -> list[Object]:
    """One or none. Keys are there as hashes: whoever can read the Secret can check a key, not use one."""
    texts = {file: _content(word, access) for word, file in _FILES.items() if getattr(access, word)}
    if not texts:
        return []
    data = {file: base64.b64encode(content).decode() for file, content in texts.items()}
    item: Object = {"apiVersion": "v1", "kind": "Secret", "metadata": {}, "type": "Opaque", "data": data}
    describe(item, _name(config), config.deploy.namespace, identity(config.name, "serving"), {})
    item["metadata"]["labels"]["app.kubernetes.io/managed-by"] = "pipe"
    return [item]


def command(config: Config, access: Access) -> str:
    """What makes the Secret by hand; empty where none is needed."""
    files = [f"--from-file={file}={getattr(access, word)}" for word, file in _FILES.items() if getattr(access, word)]
    chosen = ["--context", config.deploy.context] if config.deploy.context else []
    argv = ["kubectl", *chosen, "--namespace", config.deploy.namespace, "create", "secret", "generic", _name(config)]
    return shlex.join([*argv, *files]) if files else ""


def _content(word: str, access: Access) -> bytes:
    return access.hashed_keys().encode() if word == "api_keys" else Path(getattr(access, word)).read_bytes()


def _name(config: Config) -> str:
    return f"{config.name}-access"
