"""The deploy step: serve a bundle on this machine or on a cluster; and a preview of what it would change."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.contract.bundle import NOT_EVALUATED, OVERRIDDEN, Bundle
from pipeline.contract.config import Config
from pipeline.contract.registry import champion_name
from pipeline.contract.run import Run, step_main
from pipeline.contract.settings.access import Access
from pipeline.executors.local import Report
from pipeline.history import Project
from pipeline.redeploy import check_deployable
from pipeline.service.process import check_golden, measure_latency, read_live
from pipeline.service.rollout import VERSION_DIGITS, promote, reason_to_start, requested_start, shadow_bundle, start
from pipeline.system.errors import BundleError, ClusterError
from pipeline.system.files import read_object, write_json
from pipeline.system.processes import exit_by_exception


def deploy(run: Run, root: Path) -> None:
    access = Access.from_settings(run.config.serve, root)
    bundle = run.bundle(access.trust)
    _check_image(run, bundle)
    on_cluster = run.config.deploy.on_cluster
    record = _on_cluster(run, bundle, access, root) if on_cluster else _locally(run, bundle, access, root)
    write_json(run.partial("deploy") / "deploy.json", record)
    if record["live"] and (verdict := bundle.manifest.verdict) in (OVERRIDDEN, NOT_EVALUATED):
        reason = "the gate was overridden" if verdict == OVERRIDDEN else verdict
        _print(f"{reason}: this bundle is served, but does not become the champion")
    elif record["live"] and not record.get("canary"):
        promote(run, bundle, name=champion_name(run.config))


def image_on_cluster(run: Run, config: Config, bundle: Bundle) -> str:
    """Return the image of the pods."""
    from k8s.objects.manifests import check_pinned  # slow to load

    _check_image(run, bundle)
    record = read_object(run.output("package") / "image.json")
    image: str = config.deploy.image or record.get("reference") or record["image"]
    check_pinned(image, "deploy.image")
    return image


def _check_image(run: Run, bundle: Bundle) -> None:
    """Check that the image was made of this bundle, so that one that was replaced with its record is noticed, too."""
    path = run.output("package") / "image.json"
    record = read_object(path) if path.is_file() else {"bundle": bundle.digest}
    if record["bundle"] != bundle.digest:
        raise BundleError(
            f"run {run.id}: its image has bundle {record['bundle'][:12]}, but the run has {bundle.digest[:12]}; "
            "restore the files, or `pipe run all --force export` exports again"
        )


def _on_cluster(run: Run, bundle: Bundle, access: Access, root: Path) -> dict[str, Any]:
    from k8s.deploy import deploy as deploy_to_cluster
    from k8s.objects.overlay import overlay_folder
    from pipeline.monitor.canary import label_reader

    image = image_on_cluster(run, run.config, bundle)
    directory, render = run.partial("deploy") / "manifests", run.config.deploy.render

    def final_path(text: str) -> str:
        """Replace the directory's name by the one it gets when the step has ended."""
        return text.replace(str(run.partial("deploy")), str(run.output("deploy")))

    try:
        record = deploy_to_cluster(
            run.config,
            bundle,
            image,
            directory,
            render,
            lambda text: _print(final_path(text)),
            access,
            overlay_folder(root, run.config),
            run.id,
            label_reader(root, run.runs, run.config, _print),
        )
    except ClusterError as error:
        raise ClusterError(final_path(str(error))) from error
    return {**record, "live": not render}


def _locally(run: Run, bundle: Bundle, access: Access, root: Path) -> dict[str, Any]:
    live = read_live(run.runs)
    live = live if live and live.alive else None
    request = requested_start(run, run.config, bundle, access, shadow_bundle(run.config, run, root), root)
    reason = reason_to_start(live, request)
    if live is None or reason:
        if live is not None:
            _print(f"a new process takes over: {reason}")
        way = "start" if live is None else "take over"
        live, golden_count = start(request, live, _print)
        if live.canary is not None:
            rest = f"the rest to bundle {live.bundle[:12]}"
            _print(f"canary at {live.url}: {live.canary.share:.3g} of the requests, {rest}")
    else:
        way, golden_count = "keep", check_golden(live.host, live.port, bundle, access, bundle.digest[:VERSION_DIGITS])
        _print(f"already live at {live.url}; golden answers are equal")
    return {
        "target": "local",
        "live": True,
        "way": way,
        "url": live.url,
        "grpc_port": live.grpc_port,
        "pid": live.pid,
        "bundle": bundle.digest,
        "canary": live.canary.share if live.canary else None,
        "golden": {"requests": golden_count},
        "latency_ms": measure_latency(live.host, live.port, bundle, access, bundle.digest[:VERSION_DIGITS]),
    }


def _print(text: str) -> None:
    print(text, flush=True)


def preview(project: Project, source: Run, config: Config, report: Report) -> list[dict[str, Any]]:
    """Return one entry for each object that would be created or changed."""
    check_deployable(source)
    access = Access.from_settings(config.serve, project.root)
    bundle = source.bundle(access.trust)
    if config.deploy.on_cluster:
        return _preview_on_cluster(source, config, bundle, access, project.root, report)
    return _preview_locally(source, config, bundle, access, project.root)


def lines(changes: Sequence[dict[str, Any]]) -> str:
    rows = [(change["object"], ["new", *change["fields"]] if change["new"] else change["fields"]) for change in changes]
    return "\n".join(f"{name}: {field}" for name, fields in rows for field in fields) or "nothing would change"


def _preview_on_cluster(
    source: Run, config: Config, bundle: Bundle, access: Access, root: Path, report: Report
) -> list[dict[str, Any]]:
    from k8s.deploy import preview as preview_on_cluster  # slow to load
    from k8s.objects.overlay import overlay_folder

    image = image_on_cluster(source, config, bundle)
    changes = preview_on_cluster(config, bundle, image, report, access, overlay_folder(root, config))
    entries = [{"object": change.name, "new": change.new, "fields": list(change.fields)} for change in changes]
    return [change for change in entries if change["new"] or change["fields"]]


def _preview_locally(source: Run, config: Config, bundle: Bundle, access: Access, root: Path) -> list[dict[str, Any]]:
    live = read_live(source.runs)
    if live is None or not live.alive:
        return [{"object": f"service/{config.name}", "new": True, "fields": []}]
    request = requested_start(source, config, bundle, access, shadow_bundle(config, source, root), root)
    reason = reason_to_start(live, request)
    fields = [f"a new process takes over: {reason}"] if reason else []
    if live.bundle != bundle.digest:
        fields.append(f"bundle {live.bundle[:12]} → {bundle.digest[:12]}")
    return [{"object": f"service/{live.name}", "new": False, "fields": fields}] if fields else []


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, exit_by_exception)
    sys.exit(step_main("deploy", deploy, sys.argv[1:]))
