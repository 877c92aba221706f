"""What `pipe deploy` would change: looked at and told, with nothing written, applied or started."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pipeline.deploy import fixed_options, image_on_cluster
from pipeline.project import Project
from pipeline.rollout import decide, stamp_of
from pipeline.runner import deployable
from pipeline.service import read_live
from pipeline.spec.access import Access
from pipeline.spec.bundle import Bundle
from pipeline.spec.config import Config
from pipeline.spec.run import Run

Say = Callable[[str], None]


def preview(project: Project, source: Run, overrides: Sequence[str], say: Say) -> list[dict[str, Any]]:
    """One entry for each object that would be new or another one; empty where nothing would change."""
    config, _ = deployable(source, overrides)
    access = Access.of(config.serve, project.root)
    bundle = source.bundle(access.trust)
    if config.deploy.target == "kubernetes":
        return _on_cluster(source, config, bundle, access, say)
    return _here(source, config, bundle, access)


def lines(changes: Sequence[dict[str, Any]]) -> str:
    told = [
        f"{change['object']}: {what}" for change in changes for what in (["new"] if change["new"] else change["fields"])
    ]
    return "\n".join(told) or "nothing would change"


def _on_cluster(source: Run, config: Config, bundle: Bundle, access: Access, say: Say) -> list[dict[str, Any]]:
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
