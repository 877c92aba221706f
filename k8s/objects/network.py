"""Who reaches the pods, and what they reach: the network policy, the way in from outside, and Prometheus.

API keys and TLS on a cluster: one Secret, mounted into the serving pods and never written to a file of ours.

The public keys that bundles are signed with are no secret: they come by the ConfigMap of the options.
"""

from __future__ import annotations

import base64
import shlex
from pathlib import Path
from typing import Any

from k8s.objects import config_map
from k8s.objects.kustomize import Object
from k8s.objects.manifests import describe, identity
from pipeline.contract.config import Config
from pipeline.contract.errors import ConfigError
from pipeline.contract.settings.access import Access
from pipeline.contract.settings.stages import Deploy

_DOWNLOADS = ("s3://", "gs://", "https://")  # KServe's initializer fetches the bundle from within the pod
_ROUTES = {"ingress": "ingress", "gateway": "httproute"}


def layers(deploy: Deploy) -> list[str]:
    """The components of the plain folder that the configuration asks for."""
    chosen = [] if deploy.sidecar else ["istio-free"]
    if deploy.metrics_adapter == "prometheus":
        chosen.append("in-flight")
    if deploy.service_monitor:
        chosen.append("servicemonitor")
    return [*chosen, *([_ROUTES[deploy.expose]] if deploy.expose != "none" else [])]


def check(deploy: Deploy) -> None:
    """Words that do not go together, before a cluster says so."""
    if deploy.expose == "gateway" and not deploy.gateway.rpartition("/")[2]:
        raise ConfigError("deploy.expose=gateway needs deploy.gateway=NAME or NAMESPACE/NAME, the Gateway to bind to")
    if deploy.mode == "deployment":
        return
    for word, idle in (("expose", "none"), ("metrics_adapter", "none"), ("service_monitor", False)):
        if getattr(deploy, word) != idle:
            raise ConfigError(
                f"deploy.{word}={getattr(deploy, word)}: KServe makes the Service, its routes and its autoscaler "
                "itself; leave it out, or set deploy.mode=deployment"
            )


def fill_policy(item: Object, config: Config) -> None:
    deploy, spec = config.deploy, item["spec"]
    spec["podSelector"]["matchLabels"] = identity(config.name, "serving")
    if deploy.clients:
        names = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": sorted(deploy.clients)}
        spec["ingress"][0]["from"] = [{"namespaceSelector": {"matchExpressions": [names]}}]
    wanted = [*deploy.egress, *(["443"] if deploy.storage_uri.startswith(_DOWNLOADS) else [])]
    spec["egress"] += [_way_out(text) for text in dict.fromkeys(wanted)]


def _way_out(text: str) -> dict[str, Any]:
    network, _, port = text.rpartition(":")
    ports = [{"port": int(port), "protocol": "TCP"}]
    return {"to": [{"ipBlock": {"cidr": network}}], "ports": ports} if network else {"ports": ports}


def fill_routes(parts: dict[str, Object], config: Config, most_bytes: int) -> None:
    """Those of them that there are; `most_bytes` is the largest body that the service takes."""
    if "HTTPRoute" in parts:
        _fill_http_route(parts["HTTPRoute"]["spec"], config)
    if "Ingress" in parts:
        _fill_ingress(parts["Ingress"]["spec"], config)
        _annotate_ingress(parts["Ingress"]["metadata"]["annotations"], config.deploy, most_bytes)
    if "ServiceMonitor" in parts:
        parts["ServiceMonitor"]["spec"]["selector"]["matchLabels"] = identity(config.name, "serving")
        parts["ServiceMonitor"]["metadata"]["labels"].update(config.deploy.monitor_labels)


def _fill_http_route(spec: Object, config: Config) -> None:
    namespace, _, name = config.deploy.gateway.rpartition("/")
    spec["parentRefs"] = [{"name": name, **({"namespace": namespace} if namespace else {})}]
    spec["hostnames"] = [config.deploy.hostname]
    if not config.deploy.hostname:
        del spec["hostnames"]
    for rule in spec["rules"]:
        rule["backendRefs"][0]["name"] = config.name
        rule["timeouts"] = {"request": f"{config.deploy.answer_seconds}s"}


def _fill_ingress(spec: Object, config: Config) -> None:
    rule = spec["rules"][0]
    rule["host"] = config.deploy.hostname
    if not config.deploy.hostname:
        del rule["host"]
    for path in rule["http"]["paths"]:
        path["backend"]["service"]["name"] = config.name
    if config.deploy.ingress_class:
        spec["ingressClassName"] = config.deploy.ingress_class
    if config.deploy.ingress_secret:
        hosts = {"hosts": [config.deploy.hostname]} if config.deploy.hostname else {}
        spec["tls"] = [{**hosts, "secretName": config.deploy.ingress_secret}]


def _annotate_ingress(notes: dict[str, str], deploy: Deploy, most_bytes: int) -> None:
    """The words of ingress-nginx, and those that the configuration brings for another controller."""
    seconds = str(deploy.answer_seconds)
    ours = {"proxy-body-size": str(most_bytes), "proxy-read-timeout": seconds, "proxy-send-timeout": seconds}
    notes |= {f"nginx.ingress.kubernetes.io/{word}": text for word, text in ours.items()}
    notes |= deploy.ingress_annotations


def fill_door(parts: dict[str, Object], deploy: Deploy, access: Access) -> None:
    """Pods that ask for a key, or encrypt by themselves: who asks them has to know."""
    if access.api_keys and "ServiceMonitor" in parts:
        if not deploy.monitor_secret:
            raise ConfigError(
                "deploy.service_monitor: with serve.api_keys Prometheus needs a key, too; put one into a Secret, under "
                "`key`, and name it by deploy.monitor_secret"
            )
        (endpoint,) = parts["ServiceMonitor"]["spec"]["endpoints"]
        endpoint["authorization"] = {"credentials": {"name": deploy.monitor_secret, "key": "key"}}
    if access.tls_key:
        _speak_tls(parts, deploy)


def _speak_tls(parts: dict[str, Object], deploy: Deploy) -> None:
    if deploy.expose != "none":
        raise ConfigError(
            f"serve.tls_certificate: with deploy.expose={deploy.expose} TLS ends before the pods; leave it and tls_key "
            "out, and give the certificate to the Gateway, or by deploy.ingress_secret to the Ingress"
        )
    for port in parts["Service"]["spec"]["ports"]:
        port["appProtocol"] = "https"
    if "ServiceMonitor" in parts:
        (endpoint,) = parts["ServiceMonitor"]["spec"]["endpoints"]
        # The certificate is of the service's name; Prometheus asks each pod by its address.
        endpoint |= {"scheme": "https", "tlsConfig": {"insecureSkipVerify": True}}


_FOLDER = "/access"
_FILES = {"api_keys": "api-keys", "tls_certificate": "tls.crt", "tls_key": "tls.key"}  # by the word that names each


def fill(pod: Object, config: Config, access: Access) -> None:
    """Mount the Secret and point the service to it; probes follow to HTTPS."""
    if access.require_signature:
        config_map.mount_keys(pod, config)
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
