"""The deploy step: a proven bundle becomes the service that answers, here or on a cluster.

What `pipe deploy` would change: looked at and told, with nothing written, applied or started.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipeline.contract.bundle import Bundle
from pipeline.contract.config import Config
from pipeline.contract.errors import ClusterError, ConfigError
from pipeline.contract.files import write_json
from pipeline.contract.run import Run, run_step
from pipeline.contract.settings.access import Access
from pipeline.contract.settings.stages import watching
from pipeline.history import Project
from pipeline.runner import deployable
from pipeline.service.cluster_record import record as record_placed
from pipeline.service.process import Live, latency, read_live
from pipeline.service.rollout import Admin, decide, promote, shadow_bundle, stamp_of, swap
from pipeline.service.start import DIGITS, Start, start


def deploy(run: Run, root: Path) -> None:
    access = Access.of(run.config.serve, root)
    bundle = run.bundle(access.trust)
    on_cluster = run.config.deploy.target == "kubernetes"
    record = _on_cluster(run, bundle, access) if on_cluster else _locally(run, bundle, access, root)
    write_json(run.partial("deploy") / "deploy.json", record)
    if record["live"] and (bundle.manifest.verdict in ("overridden", "forced") or record.get("force_reason")):
        _say("forced past the gate: it serves, but the champion that candidates must beat stays as it was")
    elif record["live"] and not record.get("canary"):
        promote(run, bundle)


def image_on_cluster(run: Run, config: Config) -> str:
    """What the pods are made of; a word that is for a local service alone is refused."""
    for word in ("canary", "shadow"):
        if getattr(config.serve, word):
            raise ConfigError(f"serve.{word}: a pod on a cluster holds one bundle; this is for a local service alone")
    from k8s.objects.manifests import check_pinned  # the local road does without

    record = json.loads((run.output("package") / "image.json").read_text())
    image: str = config.deploy.image or record.get("reference") or record["image"]
    check_pinned(image, "deploy.image")
    return image


def _on_cluster(run: Run, bundle: Bundle, access: Access) -> dict[str, Any]:
    from k8s.deploy import deploy as deploy_to_cluster

    image = image_on_cluster(run, run.config)
    directory, render = run.partial("deploy") / "manifests", run.config.deploy.render

    def final(text: str) -> str:
        """The directory gets its real name when the step is over; that is the one to tell."""
        return text.replace(str(run.partial("deploy")), str(run.output("deploy")))

    try:
        record = deploy_to_cluster(run.config, bundle, image, directory, render, lambda text: _say(final(text)), access)
    except ClusterError as error:
        raise ClusterError(final(str(error))) from error
    if not render:
        record_placed(run, run.config.name, record)
    return {**record, "live": not render}


def _locally(run: Run, bundle: Bundle, access: Access, root: Path) -> dict[str, Any]:
    live = read_live(run.runs)
    live = live if live and live.alive else None
    fixed = fixed_options(run.config, access)
    order = Start(run, bundle, access, fixed, stamp_of(fixed), shadow_bundle(run.config, run, root))
    way, why = decide(live, run.config, bundle, order.stamp)
    if live is not None and way == "swap" and not Admin(live).answers():
        way, why = "take over", "the one that serves does not answer on its admin port"
    if live is not None and way == "swap":
        live, asked = _swap(order, live)
    else:
        if live is not None:
            _say(f"a new process takes over: {why}")
        live, asked = start(order, live, _say)
    return {
        "target": "local",
        "live": True,
        "way": way,
        "url": live.url,
        "grpc_port": live.grpc_port,
        "pid": live.pid,
        "bundle": bundle.digest,
        "canary": live.canary.share if live.canary else None,
        "golden": {"requests": asked},
        "latency_ms": latency(live.host, live.port, bundle, access, bundle.digest[:DIGITS]),
    }


def fixed_options(config: Config, access: Access) -> list[str]:
    """Of the process, for its whole life."""
    return [*access.options, *watching(config.serve), "--keep-versions", str(config.serve.keep_versions)]


def _swap(order: Start, old: Live) -> tuple[Live, int]:
    live, asked = swap(order.run, order.bundle, old, order.shadow, _say)
    if live.canary is not None:
        _say(f"canary at {live.url}: {live.canary.share:.3g} of the requests, the rest to bundle {live.bundle[:12]}")
    elif old.bundle == live.bundle:
        _say(f"already live at {live.url}; golden answers are equal")
    else:
        _say(f"switched from bundle {old.bundle[:12]}, which stays loaded: `pipe rollback` goes back at once")
        _say(f"live at {live.url} (gRPC {live.grpc_port}, pid {live.pid})")
    return live, asked


def _say(text: str) -> None:
    print(text, flush=True)


def _leave(signal_number: int, _frame: object) -> None:
    """What is under way is undone on the way out: a lease is given back, a canary ends."""
    sys.exit(128 + signal_number)


Say = Callable[[str], None]


def preview(project: Project, source: Run, overrides: Sequence[str], say: Say) -> list[dict[str, Any]]:
    """One entry for each object that would be new or another one; empty where nothing would change."""
    config, _ = deployable(source, overrides)
    access = Access.of(config.serve, project.root)
    bundle = source.bundle(access.trust)
    if config.deploy.target == "kubernetes":
        return _preview_on_cluster(source, config, bundle, access, say)
    return _here(source, config, bundle, access)


def lines(changes: Sequence[dict[str, Any]]) -> str:
    told = [
        f"{change['object']}: {what}" for change in changes for what in (["new"] if change["new"] else change["fields"])
    ]
    return "\n".join(told) or "nothing would change"


def _preview_on_cluster(source: Run, config: Config, bundle: Bundle, access: Access, say: Say) -> list[dict[str, Any]]:
    from k8s.deploy import preview as preview_on_cluster  # the local road does without

    changes = preview_on_cluster(config, bundle, image_on_cluster(source, config), say, access)
    found = [{"object": change.label, "new": change.new, "fields": list(change.fields)} for change in changes]
    return [change for change in found if change["new"] or change["fields"]]


def _here(source: Run, config: Config, bundle: Bundle, access: Access) -> list[dict[str, Any]]:
    live = read_live(source.runs)
    live = live if live and live.alive else None
    way, why = decide(live, config, bundle, stamp_of(fixed_options(config, access)))
    if live is None:
        return [{"object": f"service/{config.name}", "new": True, "fields": []}]
    fields = [f"a new process takes over: {why}"] if way == "take over" else []
    if live.bundle != bundle.digest:
        fields.append(f"bundle {live.bundle[:12]} → {bundle.digest[:12]}")
    return [{"object": f"service/{live.name}", "new": False, "fields": fields}] if fields else []


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _leave)
    sys.exit(run_step("deploy", deploy, sys.argv[1:]))
