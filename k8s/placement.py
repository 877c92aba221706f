"""Which nodes take a pod: GPUs, spot capacity, and the node labels and taints that the configuration names."""

from __future__ import annotations

import re
from typing import Any

from k8s.manifest import GPU, Object
from pipeline.spec.cluster import Placed

_TOLERATION = re.compile(r"^(?P<key>[^=:]+)(=(?P<value>[^:]*))?(:(?P<effect>\w+))?$")


def layers(gpus: int, placed: Placed) -> list[str]:
    """The components of a folder that the configuration asks for, in the order they are laid on."""
    return ["gpu" if gpus else "cpu", *(["spot"] if placed.spot else [])]


def place(pod: Object, container: Object, gpus: int, placed: Placed) -> None:
    """Fill in what the components left open; what stays empty is not written."""
    if gpus:
        container["resources"].setdefault("limits", {})[GPU] = str(gpus)
    pod["nodeSelector"] = {**pod.get("nodeSelector", {}), **placed.node_selector}
    pod["tolerations"] = [*pod.get("tolerations", []), *(toleration(text) for text in placed.tolerations)]
    if placed.pull_secret:
        pod["imagePullSecrets"] = [{"name": placed.pull_secret}]
    for word in ("nodeSelector", "tolerations"):
        if not pod[word]:
            del pod[word]


def toleration(text: str) -> dict[str, Any]:
    """As `kubectl taint` writes one: `key=value:Effect`, where value and effect may be missing."""
    found = _TOLERATION.match(text)
    assert found is not None, text  # the configuration is checked
    compared = {"operator": "Exists"} if found["value"] is None else {"operator": "Equal", "value": found["value"]}
    return {"key": found["key"], **compared, **({"effect": found["effect"]} if found["effect"] else {})}
