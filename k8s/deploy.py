"""Deploying a bundle to a cluster: render manifests, run a canary, apply, wait, and send the golden requests."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k8s.cluster import smoke
from k8s.cluster.canary import CanaryResult, CanaryRollout, canary_deployment, canary_name
from k8s.cluster.cluster import Change, Cluster, Report
from k8s.cluster.garbage_collection import delete_unused_configuration
from k8s.cluster.lease import LEASE_TIMEOUT_SECONDS, Lease, holder_identity
from k8s.objects import network, serving
from k8s.objects.kustomize import Object
from k8s.objects.manifests import (
    BUNDLE_ANNOTATION,
    WORKLOAD_KINDS,
    format_selector,
    identity_labels,
    kubectl_name,
    write_manifests,
)
from k8s.objects.overlay import overlay_digest
from pipeline.contract.bundle import Bundle, check_gate
from pipeline.contract.config import Config
from pipeline.contract.settings.access import OPEN_ACCESS, Access
from pipeline.system.errors import ClusterError, ResourceError, StageError


def deploy(
    config: Config,
    bundle: Bundle,
    image: str,
    directory: Path,
    render_only: bool,
    report: Report,
    access: Access = OPEN_ACCESS,
    on_apply: Callable[[str], None] = lambda _: None,
    overlay: Path | None = None,
) -> dict[str, Any]:
    """Render the manifests into a folder and, unless `render_only`, deploy them; return what is recorded.

    `on_apply` is called with the server before the new version is applied to it.
    """
    check_gate(bundle.manifest.verdict, str(bundle.path))
    objects = serving.serving_objects(config, bundle, image, access, overlay)
    files = write_manifests(objects, directory)
    commands = _remaining_commands(config, access, directory)
    record: dict[str, Any] = {
        "target": config.deploy.target,
        "context": config.deploy.context,
        "namespace": config.deploy.namespace,
        "image": image,
        "bundle": bundle.digest,
        "overlay": overlay_digest(overlay),
        "manifests": [file.name for file in files],
        "golden": {"requests": 0},
        "applied": [],
    }
    report(f"rendered {len(files)} manifests to {directory}")
    if render_only:
        report(f"nothing was applied; {commands}")
        return record
    try:
        cluster = Cluster.connect(config.deploy.context, config.deploy.namespace)
    except ResourceError as error:
        message = f"no cluster to deploy to: {error}. The manifests are in {directory}; {commands}"
        raise ClusterError(message) from error
    report(f"deploying to {cluster.describe()}")
    with deployment_lease(cluster, config).hold(LEASE_TIMEOUT_SECONDS, report) as check_lease:
        before_apply = lambda: on_apply(cluster.connection.server)  # noqa: E731
        outcome = Deployer(config, bundle, objects, access, cluster, report, check_lease, before_apply).run()
    return {**record, **outcome, "context": cluster.context, "server": cluster.connection.server}


def preview(
    config: Config,
    bundle: Bundle,
    image: str,
    report: Report,
    access: Access = OPEN_ACCESS,
    overlay: Path | None = None,
) -> list[Change]:
    """Return what a deployment would change, by a dry run on the server; write nothing."""
    check_gate(bundle.manifest.verdict, str(bundle.path))
    secrets = network.access_secrets(config, access)
    objects = [*secrets, *serving.serving_objects(config, bundle, image, access, overlay)]
    cluster = Cluster.connect(config.deploy.context, config.deploy.namespace)
    report(f"comparing with {cluster.describe()}")
    if percent := config.rollout.canary_percent:
        report(f"a canary with {percent:g} % of the requests would come first; the changes below are those for all")
    for item in objects:
        if item["kind"] == "Secret":
            report(f"{kubectl_name(item)} would be written again; its current content is never read")
    return cluster.plan(objects)


def end_canary(config: Config, report: Report) -> None:
    """Delete the canary's Deployment: the stable version gets all requests again."""
    cluster = Cluster.connect(config.deploy.context, config.deploy.namespace)
    report(f"ending the canary on {cluster.describe()}")
    canary = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": canary_name(config.name)}}
    with deployment_lease(cluster, config).hold(LEASE_TIMEOUT_SECONDS, report) as check_lease:
        cluster.delete(canary)
        delete_unused_configuration(cluster, config.name, "", report, check_lease)


def deployment_lease(cluster: Cluster, config: Config) -> Lease:
    return Lease(cluster.connection, config.deploy.namespace, f"{config.name}-deploy", holder_identity())


@dataclass(frozen=True)
class Deployer:
    """Deploys one bundle to one cluster."""

    config: Config
    bundle: Bundle
    objects: list[Object]
    access: Access
    cluster: Cluster
    report: Report
    check_lease: Callable[[], None]  # raises once another deployment has started
    before_apply: Callable[[], None]

    @property
    def workload(self) -> Object:
        return next(item for item in self.objects if item["kind"] in WORKLOAD_KINDS)

    @property
    def configuration(self) -> list[Object]:
        """The Secret of the pods, if there is one, and their ConfigMap."""
        config_maps = [item for item in self.objects if item["kind"] == "ConfigMap"]
        return [*network.access_secrets(self.config, self.access), *config_maps]

    def run(self) -> dict[str, Any]:
        """Run the canary if one is configured, then give the new version all requests."""
        live, rollout = self.cluster.read(self.workload), self.config.rollout
        if rollout.canary_percent and (result := self._run_canary(live)) is not None:
            return {"canary": rollout.canary_percent, "canary_result": result, "applied": []}
        objects = [*network.access_secrets(self.config, self.access), *self.objects]
        self.check_lease()
        self.before_apply()
        previous = self._read_digests(live)
        applied = self.cluster.apply(objects, self.report)
        self.report(f"applied {', '.join(applied)}")
        try:
            count = self._wait_and_check(previous)
        except StageError as error:
            hint = "; it is applied, and `pipe registry rollback` restores the version before it" if live else ""
            raise StageError(f"{error}{hint}") from error
        self.report(f"{count} golden requests answered as at export")
        self._delete_unused_configuration(self.configuration[-1]["metadata"]["name"])
        return {"canary": None, "applied": applied, "golden": {"requests": count}}

    def _run_canary(self, live: Object | None) -> str | None:
        """Return the result of a canary that a person has to end; None if the new version gets all requests."""
        if live is None:
            self.report("rollout.canary_percent: nothing serves yet, so this bundle gets all requests")
            return None
        if not self._changes_pods():
            self.report("rollout.canary_percent: this version serves already")
            return None
        self.check_lease()
        self.cluster.apply(self.configuration, self.report)
        try:
            result = self._start_canary(live)
        except StageError:
            self._delete_unused_configuration("")
            raise
        return result.text if result.outcome == "inconclusive" else None

    def _start_canary(self, live: Object) -> CanaryResult:
        result = CanaryRollout(
            cluster=self.cluster,
            bundle=self.bundle,
            candidate=canary_deployment(self.objects),
            stable=live,
            settings=self.config.rollout,
            timeout_seconds=self.config.deploy.timeout_seconds,
            headers=self.access.headers(),
            report=self.report,
            check_lease=self.check_lease,
        ).run()
        if result.outcome == "roll back":
            raise StageError(f"the canary was rolled back, the stable version gets all requests: {result.text}")
        return result

    def _delete_unused_configuration(self, keep: str) -> None:
        delete_unused_configuration(self.cluster, self.config.name, keep, self.report, self.check_lease)

    def _changes_pods(self) -> bool:
        """Return whether the pods would change, be it in their bundle, image or options."""
        (change,) = self.cluster.plan([self.workload])
        return any(field.startswith(("spec.template.", "spec.predictor.")) for field in change.fields)

    def _read_digests(self, live: Object | None) -> frozenset[str]:
        """Return the bundles of all pods there are, and of the workload."""
        selector = format_selector(identity_labels(self.config.name, "serving"))
        owners = [*([live] if live else []), *self.cluster.select(selector)]
        annotations = (item["metadata"].get("annotations", {}) for item in owners)
        return frozenset(item[BUNDLE_ANNOTATION] for item in annotations if BUNDLE_ANNOTATION in item)

    def _wait_and_check(self, previous: frozenset[str]) -> int:
        """Wait for the roll-out and send the golden requests; return their number."""
        self.cluster.wait(self.objects, self.config.deploy.timeout_seconds, self.report)
        if not self.config.deploy.by_kserve:
            self.cluster.delete(canary_deployment(self.objects))
        headers = self.access.headers()
        return smoke.check_service(self.cluster, self._service_name(), self.bundle, self.report, headers, previous)

    def _service_name(self) -> str:
        """Return the Service of the pods, as the API server's proxy names it."""
        return ("https:" if self.access.tls_key else "") + serving.service_name(self.config)


def _remaining_commands(config: Config, access: Access, directory: Path) -> str:
    """Return the commands that finish a deployment by hand."""
    create_command = network.create_secret_command(config, access)
    context = ["--context", config.deploy.context] if config.deploy.context else []
    apply_command = shlex.join(["kubectl", *context, "apply", "--server-side", "-k", str(directory)])
    create_secret = (
        f"create the Secret, which is in no manifest, with `{create_command}`, then " if create_command else ""
    )
    return f"{create_secret}apply them with `{apply_command}`"
