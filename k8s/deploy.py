"""From a bundle and an image to a proven service on a cluster, or to files ready to be applied."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from k8s import access, render, serving, smoke
from k8s.cluster import Cluster, Say
from pipeline.spec.access import ANYBODY, Access
from pipeline.spec.bundle import Bundle
from pipeline.spec.config import Config
from pipeline.spec.errors import ClusterError, ResourceError


def deploy(
    config: Config,
    bundle: Bundle,
    image: str,
    directory: Path,
    render_only: bool,
    say: Say,
    entry: Access = ANYBODY,
) -> dict[str, Any]:
    """Render, apply, wait, prove; returns what is worth recording."""
    objects = serving.objects(config, bundle, image, entry)
    namespace = config.deploy.namespace
    files = render.write(objects, directory)
    by_hand = _by_hand(config, entry, directory)
    record: dict[str, Any] = {
        "target": "kubernetes",
        "context": config.deploy.context,
        "namespace": namespace,
        "image": image,
        "bundle": bundle.digest,
        "manifests": [file.name for file in files],
        "golden": {"requests": 0},
        "applied": [],
    }
    say(f"rendered {len(files)} manifests to {directory}")
    if render_only:
        say(f"nothing was applied; {by_hand}")
        return record
    try:
        cluster = Cluster.connect(config.deploy.context)
    except ResourceError as error:
        raise ClusterError(f"no cluster to deploy to: {error}. The manifests are in {directory}; {by_hand}") from error
    say(f"deploying to {cluster.describe()}, namespace {namespace}")
    applied = cluster.apply([*access.secrets(config, entry), *objects], namespace, say)
    say(f"applied {', '.join(applied)}")
    cluster.wait(objects, namespace, config.deploy.timeout_seconds, say)
    asked = smoke.check(cluster, namespace, _address(config, entry), bundle, say, entry.headers())
    say(f"{asked} golden requests answered as at export")
    return {**record, "context": cluster.context, "applied": applied, "golden": {"requests": asked}}


def _address(config: Config, entry: Access) -> str:
    """The service as the API server's proxy names it."""
    return ("https:" if entry.tls_key else "") + serving.service_name(config)


def _by_hand(config: Config, entry: Access, directory: Path) -> str:
    """The commands that do what is left to do."""
    make, apply = access.command(config, entry), _command(config.deploy.context, directory)
    first = f"make the Secret, which is in no manifest, with `{make}`, then " if make else ""
    return f"{first}apply them with `{apply}`"


def _command(context: str, directory: Path) -> str:
    chosen = ["--context", context] if context else []
    return shlex.join(["kubectl", *chosen, "apply", "--server-side", "-k", str(directory)])
