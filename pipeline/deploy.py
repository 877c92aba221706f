"""The deploy step: a proven bundle becomes the service that answers, here or on a cluster."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

from pipeline.admin import Admin
from pipeline.champion import promote
from pipeline.placed import record as record_placed
from pipeline.rollout import decide, shadow_bundle, stamp_of, swap
from pipeline.service import Live, read_live
from pipeline.smoke import latency
from pipeline.spec.access import Access
from pipeline.spec.bundle import Bundle
from pipeline.spec.config import Config
from pipeline.spec.errors import ClusterError, ConfigError
from pipeline.spec.files import write_json
from pipeline.spec.run import Run
from pipeline.spec.sections import watching
from pipeline.spec.step import run_step
from pipeline.start import DIGITS, Start, start


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
    from k8s.manifest import check_pinned  # the local road does without

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


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _leave)
    sys.exit(run_step("deploy", deploy, sys.argv[1:]))
