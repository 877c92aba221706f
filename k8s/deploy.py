"""From a bundle and an image to a proven service on a cluster, or to files ready to be applied."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from k8s import render, serving, smoke
from k8s.cluster import Cluster
from pipeline.spec.bundle import Bundle
from pipeline.spec.config import Config
from pipeline.spec.errors import ClusterError, ResourceError


def deploy(
    config: Config, bundle: Bundle, image: str, directory: Path, render_only: bool, say: Callable[[str], None]
) -> dict[str, Any]:
    """Render, apply, wait, prove; returns what is worth recording."""
    objects = serving.objects(config, bundle, image)
    namespace = config.deploy.namespace
    files = render.write(objects, directory)
    command = _command(config.deploy.context, directory)
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
        say(f"nothing was applied; to apply them: {command}")
        return record
    try:
        cluster = Cluster.connect(config.deploy.context)
    except ResourceError as error:
        raise ClusterError(
            f"no cluster to deploy to: {error}. The manifests are in {directory}; apply them with `{command}`"
        ) from error
    say(f"deploying to {cluster.describe()}, namespace {namespace}")
    applied = cluster.apply(objects, namespace, say)
    say(f"applied {', '.join(applied)}")
    cluster.wait(objects, namespace, config.deploy.timeout_seconds, say)
    asked = smoke.check(cluster, namespace, serving.service_name(config), bundle, say)
    say(f"{asked} golden requests answered as at export")
    return {**record, "context": cluster.context, "applied": applied, "golden": {"requests": asked}}


def _command(context: str, directory: Path) -> str:
    chosen = ["--context", context] if context else []
    return shlex.join(["kubectl", *chosen, "apply", "--server-side", "-k", str(directory)])
