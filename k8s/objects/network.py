"""Network access to the serving pods: policy, Ingress or HTTPRoute, Prometheus, and the Secret with API keys and TLS.

The Secret is mounted into the pods and never written to a file. The public keys for signatures are not secret: they
are in the ConfigMap of the options.
"""

from __future__ import annotations

import base64
import math
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from k8s.objects.kustomize import Object
from k8s.objects.manifests import SIGNATURE_KEYS, identity_labels, name_by_content, set_metadata
from pipeline.contract.config import Config
from pipeline.contract.settings.access import Access
from pipeline.contract.settings.stages import Deploy, Serve
from pipeline.system.errors import ConfigError

_DOWNLOAD_SCHEMES = ("s3://", "gs://", "https://")  # KServe's storage initializer downloads from within the pod
_ACCESS_FOLDER, _KEYS_FOLDER = "/access", "/signature-keys"
_SECRET_FILES = {"api_keys": "api-keys", "tls_certificate": "tls.crt", "tls_key": "tls.key"}  # setting → file name


def components(deploy: Deploy) -> list[str]:
    """Return the kustomize components of k8s/manifests/serve that the configuration needs."""
    settings = {"in-flight": deploy.target_concurrency, "ingress": deploy.ingress_class, "httproute": deploy.gateway}
    return [component for component, setting in settings.items() if setting]


def check_settings(deploy: Deploy) -> None:
    """Refuse settings that exclude each other."""
    if deploy.ingress_class and deploy.gateway:
        raise ConfigError("deploy.ingress_class and deploy.gateway are both set; requests come in by one of them")
    if not deploy.by_kserve:
        return
    for name in ("ingress_class", "gateway", "target_concurrency"):
        if value := getattr(deploy, name):
            raise ConfigError(
                f"deploy.{name}={value}: KServe creates the Service, its routes and its autoscaler; leave it out, "
                "or set deploy.target=kubernetes"
            )


def fill_policy(item: Object, config: Config) -> None:
    deploy, spec = config.deploy, item["spec"]
    spec["podSelector"]["matchLabels"] = identity_labels(config.name, "serving")
    if deploy.clients:
        names = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": sorted(deploy.clients)}
        spec["ingress"][0]["from"] = [{"namespaceSelector": {"matchExpressions": [names]}}]
    urls = [config.serve.sample_to, config.serve.sample_url] if config.serve.sample else []
    urls += [deploy.storage_uri] if deploy.storage_uri.startswith(_DOWNLOAD_SCHEMES) else []
    destinations = [*deploy.egress, *(_port(url) for url in urls if "://" in url)]
    spec["egress"] += [_egress_rule(text) for text in dict.fromkeys(destinations)]


def _port(url: str) -> str:
    parts = urlsplit(url)
    return str(parts.port or (80 if parts.scheme == "http" else 443))


def _egress_rule(text: str) -> dict[str, Any]:
    network, _, port = text.rpartition(":")
    ports = [{"port": int(port), "protocol": "TCP"}]
    return {"to": [{"ipBlock": {"cidr": network}}], "ports": ports} if network else {"ports": ports}


def fill_routes(parts: dict[str, Object], config: Config, max_body_bytes: int) -> None:
    """Fill in HTTPRoute and Ingress, where they are there."""
    if "HTTPRoute" in parts:
        _fill_http_route(parts["HTTPRoute"]["spec"], config)
    if "Ingress" in parts:
        _fill_ingress(parts["Ingress"]["spec"], config)
        _annotate_ingress(parts["Ingress"]["metadata"]["annotations"], config, max_body_bytes)


def _fill_http_route(spec: Object, config: Config) -> None:
    namespace, _, name = config.deploy.gateway.rpartition("/")
    spec["parentRefs"] = [{"name": name, **({"namespace": namespace} if namespace else {})}]
    spec["hostnames"] = [config.deploy.hostname]
    if not config.deploy.hostname:
        del spec["hostnames"]
    for rule in spec["rules"]:
        rule["backendRefs"][0]["name"] = config.name
        rule["timeouts"] = {"request": f"{_request_timeout_seconds(config.serve)}s"}


def _fill_ingress(spec: Object, config: Config) -> None:
    rule = spec["rules"][0]
    rule["host"] = config.deploy.hostname
    if not config.deploy.hostname:
        del rule["host"]
    for path in rule["http"]["paths"]:
        path["backend"]["service"]["name"] = config.name
    if config.deploy.ingress_class != "default":
        spec["ingressClassName"] = config.deploy.ingress_class


def _annotate_ingress(annotations: dict[str, str], config: Config, max_body_bytes: int) -> None:
    """Add the annotations of ingress-nginx; an overlay adds those of another controller."""
    seconds = str(_request_timeout_seconds(config.serve))
    nginx = {"proxy-body-size": str(max_body_bytes), "proxy-read-timeout": seconds, "proxy-send-timeout": seconds}
    annotations |= {f"nginx.ingress.kubernetes.io/{name}": text for name, text in nginx.items()}


def _request_timeout_seconds(serve: Serve) -> int:
    """Return how long a proxy waits for a response: as long as a request may take, and at least a minute."""
    return max(60, math.ceil(serve.deadline_seconds))


def use_tls(parts: dict[str, Object], deploy: Deploy, access: Access) -> None:
    """Mark the ports of the Service as encrypted, if the pods use TLS."""
    if not access.tls_key:
        return
    if deploy.ingress_class or deploy.gateway:
        setting = "ingress_class" if deploy.ingress_class else "gateway"
        raise ConfigError(
            f"serve.tls_certificate: with deploy.{setting} TLS ends before the pods; leave it and tls_key out and give "
            "the certificate to the Gateway, or by deploy.overlay to the Ingress"
        )
    for port in parts["Service"]["spec"]["ports"]:
        port["appProtocol"] = "https"


def mount_access(pod: Object, config: Config, access: Access, config_map: str) -> None:
    """Mount the Secret and the signature keys, and pass their files to the service."""
    args: list[str] = pod["containers"][0]["args"]
    if access.require_signature:
        items = [{"key": SIGNATURE_KEYS, "path": "keys"}]
        _mount(pod, "signature-keys", _KEYS_FOLDER, {"configMap": {"name": config_map, "items": items}})
        args.append(f"--require-signature={_KEYS_FOLDER}/keys")
    if not (options := mounted_access(access).options):
        return
    if access.tls_key and config.deploy.by_kserve:
        raise ConfigError("serve.tls_certificate: KServe's gateway ends TLS before the pods; leave it and tls_key out")
    _mount(pod, "access", _ACCESS_FOLDER, {"secret": {"secretName": secret_name(config, access)}})
    args.extend(options)


def mounted_access(access: Access) -> Access:
    """Return the files of the Secret as pods have them."""
    return Access(**{name: f"{_ACCESS_FOLDER}/{file}" for name, file in _SECRET_FILES.items() if getattr(access, name)})


def _mount(pod: Object, name: str, folder: str, source: Object) -> None:
    pod["volumes"].append({"name": name, **source})
    pod["containers"][0]["volumeMounts"].append({"name": name, "mountPath": folder, "readOnly": True})


def access_secrets(config: Config, access: Access) -> list[Object]:
    """Return one Secret or none. API keys are stored as hashes: with the Secret one can check a key, not use it."""
    contents = _secret_data(access)
    if not contents:
        return []
    item: Object = {"apiVersion": "v1", "kind": "Secret", "metadata": {}, "type": "Opaque", "data": contents}
    item["immutable"] = True
    name = secret_name(config, access)
    set_metadata(item, name, config.deploy.namespace, identity_labels(config.name, "serving"), {})
    item["metadata"]["labels"]["app.kubernetes.io/managed-by"] = "pipe"
    return [item]


def create_secret_command(config: Config, access: Access) -> str:
    """Return the command that creates the Secret by hand; empty if none is needed."""
    files = [f"--from-file={file}={path}" for name, file in _SECRET_FILES.items() if (path := getattr(access, name))]
    context = ["--context", config.deploy.context] if config.deploy.context else []
    argv = ["kubectl", *context, "--namespace", config.deploy.namespace, "create", "secret", "generic"]
    return shlex.join([*argv, secret_name(config, access), *files]) if files else ""


def secret_name(config: Config, access: Access) -> str:
    """Return the name of the Secret by its content; empty if there is none."""
    data = _secret_data(access)
    return name_by_content(f"{config.name}-access", data) if data else ""


def _secret_data(access: Access) -> dict[str, str]:
    contents = {file: _file_content(name, access) for name, file in _SECRET_FILES.items() if getattr(access, name)}
    return {file: base64.b64encode(content).decode() for file, content in contents.items()}


def _file_content(name: str, access: Access) -> bytes:
    return access.hashed_keys().encode() if name == "api_keys" else Path(getattr(access, name)).read_bytes()
