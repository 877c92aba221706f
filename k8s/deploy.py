"""Deploying a bundle to a cluster: render manifests, run a canary, apply, wait, and send the golden requests.

Promoting a canary, continuing it, and restoring an earlier version start from what is recorded on the cluster.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k8s.cluster import smoke
from k8s.cluster.canary import CanaryRollout, canary_deployment, canary_name, uses_tls
from k8s.cluster.cluster import Change, Cluster, Report
from k8s.cluster.history import History, Version, delete, delete_unused, delete_version, read_history, write_version
from k8s.cluster.lease import LEASE_TIMEOUT_SECONDS, Lease, holder_identity
from k8s.objects import network, serving
from k8s.objects.kustomize import Object
from k8s.objects.manifests import BUNDLE_ANNOTATION, format_selector, identity_labels, kubectl_name, write_manifests
from k8s.objects.overlay import overlay_digest
from pipeline.contract.bundle import Bundle, check_gate
from pipeline.contract.canary import LabelMetric
from pipeline.contract.config import Config
from pipeline.contract.settings.access import OPEN_ACCESS, Access
from pipeline.system.errors import ClusterError, ConfigError, ResourceError, StageError

FindBundle = Callable[[Version], Bundle | None]  # None if it is not on this machine
# Reads the metric of the stable version, if `pipe` deployed it, and of the canary since a time.
CompareLabels = Callable[[Version | None, Version, float], LabelMetric | str]


def deploy(
    config: Config,
    bundle: Bundle,
    image: str,
    directory: Path,
    render_only: bool,
    report: Report,
    access: Access = OPEN_ACCESS,
    overlay: Path | None = None,
    run: str = "",
    labels: CompareLabels | None = None,
) -> dict[str, Any]:
    """Render the manifests into a folder and, unless `render_only`, deploy them; return what is recorded."""
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
        with _deployer(config, access, report, labels) as deployer:
            version = deployer.history().begin(objects, run=run, bundle=bundle.digest, image=image)
            secrets = network.access_secrets(config, access)
            outcome = deployer.deploy(version, smoke.Expected.from_bundle(bundle, bundle.digest), secrets)
            cluster = deployer.cluster
    except NoCluster as error:
        message = f"no cluster to deploy to: {error}. The manifests are in {directory}; {commands}"
        raise ClusterError(message) from error
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
    objects = serving.serving_objects(config, bundle, image, access, overlay)
    cluster = Cluster.connect(config.deploy.context, config.deploy.namespace)
    report(f"comparing with {cluster.describe()}")
    if percent := config.rollout.canary_percent:
        report(f"a canary with {percent:g} % of the connections would come first; the changes below are those for all")
    history = read_versions(cluster, config)
    version = history.begin(objects, run="", bundle=bundle.digest, image=image)
    secrets = network.access_secrets(config, access)
    for item in secrets:
        report(f"{kubectl_name(item)} would be written again; its current content is never read")
    return [*cluster.plan([*secrets, *version.objects]), *_deletions(history.unwanted_objects(cluster, objects))]


def promote(config: Config, access: Access, report: Report, find: FindBundle, run: str = "") -> Version:
    """Give the canary on the cluster all requests; `run` is that which it must be of."""
    with _deployer(config, access, report) as deployer:
        version = deployer.require_canary()
        if run not in ("", version.run):
            raise ConfigError(f"the canary is {version.title}, so run {run} is not promoted")
        deployer.serve(version, _expected(find, version), version.objects)
        return version


def find_canary(config: Config) -> Version | None:
    """Return the canary on the cluster, if there is one."""
    return read_versions(Cluster.connect(config.deploy.context, config.deploy.namespace), config).canary


def continue_canary(
    config: Config, access: Access, report: Report, find: FindBundle, labels: CompareLabels | None = None
) -> Version:
    """Measure the canary on the cluster, then promote it or end it."""
    with _deployer(config, access, report, labels) as deployer:
        version = deployer.require_canary()
        if not (config.rollout.auto and config.rollout.canary_percent):
            raise ConfigError(
                f"a canary is on the cluster, {version.title}: `pipe deploy --watch --canary PERCENT --auto` measures "
                "it, `pipe registry promote` or `pipe registry rollback` ends it, `pipe deploy RUN` deploys another run"
            )
        report(f"continuing the canary of {version.title}")
        deployer.deploy(version, _expected(find, version))
        return version


def roll_back(
    config: Config, access: Access, report: Report, find: FindBundle, number: int | None = None
) -> tuple[Version | None, Version | None]:
    """End the canary, or restore the previous version, or the one with this number.

    Returns the version that serves now, if `pipe` has deployed it, and the canary that was ended.
    """
    with _deployer(config, access, report) as deployer:
        history = deployer.history()
        if history.live_canary is not None and number is None:
            deployer.end_canary(history.canary)
            return history.current, history.canary
        version = history.to_restore(number)
        report(f"restoring {version.title}")
        deployer.serve(version, _expected(find, version), version.pod_objects, restore=True)
        return version, None


def _expected(find: FindBundle, version: Version) -> smoke.Expected:
    return smoke.Expected.from_bundle(find(version), version.bundle)


class NoCluster(ResourceError):
    """No connection to the cluster."""


@contextmanager
def _deployer(
    config: Config, access: Access, report: Report, labels: CompareLabels | None = None
) -> Iterator[Deployer]:
    """Connect, and hold the lease of the service."""
    try:
        cluster = Cluster.connect(config.deploy.context, config.deploy.namespace)
    except ResourceError as error:
        raise NoCluster(str(error)) from error
    report(f"deploying to {cluster.describe()}")
    with deployment_lease(cluster, config).hold(LEASE_TIMEOUT_SECONDS, report) as check_lease:
        yield Deployer(config, access, cluster, report, check_lease, labels)


def deployment_lease(cluster: Cluster, config: Config) -> Lease:
    return Lease(cluster.connection, config.deploy.namespace, f"{config.name}-deploy", holder_identity())


def read_versions(cluster: Cluster, config: Config) -> History:
    if config.rollout.controller != "pipe":
        raise ConfigError(
            f"rollout.controller={config.rollout.controller}: `pipe` does not follow the roll-outs of another "
            "controller; use `pipe deploy --render`, and let Argo CD or kubectl apply the manifests"
        )
    return read_history(cluster, config.name, "InferenceService" if config.deploy.by_kserve else "Deployment")


def _deletions(objects: Sequence[Object]) -> list[Change]:
    return [Change(kubectl_name(item), False, ("deleted, as no setting makes it any more",)) for item in objects]


@dataclass(frozen=True)
class Deployer:
    """Changes the version that one cluster serves, while it holds the lease."""

    config: Config
    access: Access
    cluster: Cluster
    report: Report
    check_lease: Callable[[], None]  # raises once another deployment has started
    labels: CompareLabels | None = None

    def history(self) -> History:
        return read_versions(self.cluster, self.config)

    def deploy(self, version: Version, expected: smoke.Expected, secrets: Sequence[Object] = ()) -> dict[str, Any]:
        """Run the canary if one is configured, then give the version all requests."""
        percent = self.config.rollout.canary_percent
        if percent and not self._run_canary(version, expected, secrets):
            return {"canary": percent, "applied": []}
        objects = [*secrets, *version.objects]
        count = self.serve(version, expected, objects)
        return {"canary": None, "applied": [kubectl_name(item) for item in objects], "golden": {"requests": count}}

    def serve(
        self, version: Version, expected: smoke.Expected, objects: Sequence[Object], restore: bool = False
    ) -> int:
        """Apply objects of the version, wait for it and record it; return the number of golden requests."""
        history = self.history()
        unwanted = history.unwanted_objects(self.cluster, version.objects)
        unwanted = [item for item in unwanted if not restore or item["kind"] == "CronJob"]
        previous = self._read_digests(history.live)
        for change in _deletions(unwanted):
            self.report(f"plan: {change.name}: {change.fields[0]}")
        applied = self.cluster.apply(objects, self.report, functools.partial(self._begin, version, restore))
        self.report(f"applied {', '.join(applied)}")
        try:
            count = self._wait_and_check(version, expected, history, previous)
        except StageError as error:
            write_version(self.cluster, self.config.name, version, "begun")
            hint = "; it is applied, and `pipe registry rollback` restores the version before it" if previous else ""
            raise StageError(f"{error}{hint}") from error
        self.report(expected.describe(count))
        write_version(self.cluster, self.config.name, version, "served")
        if restore and history.unfinished not in (None, version):
            write_version(self.cluster, self.config.name, history.unfinished, "undone")
        for item in unwanted:
            self.check_lease()
            delete(item, self.cluster, self.report)
        self._delete_unused()
        return count

    def require_canary(self) -> Version:
        history = self.history()
        if history.canary is None:
            raise ConfigError(
                f"{self.config.name} has no canary in namespace {self.cluster.namespace} of {self.cluster.context}, so "
                "nothing is promoted; `pipe deploy --canary PERCENT` starts one"
            )
        return history.canary

    def end_canary(self, version: Version | None) -> None:
        """Delete the canary's Deployment and its record: the stable version gets all requests again."""
        self.check_lease()
        self.cluster.delete(_canary_object(self.config.name))
        self._forget(version)

    def _forget(self, version: Version | None) -> None:
        self.check_lease()
        if version is not None:
            delete_version(self.cluster, self.config.name, version.number)
        self._delete_unused()

    def _begin(self, version: Version, restore: bool) -> None:
        self.check_lease()
        write_version(self.cluster, self.config.name, version, "restoring" if restore else "begun")

    def _run_canary(self, version: Version, expected: smoke.Expected, secrets: Sequence[Object]) -> bool:
        """Return whether the version gets all requests; False if the canary stays until a person ends it."""
        history = self.history()
        if history.live is None:
            self.report("rollout.canary_percent: nothing serves yet, so this bundle gets all requests")
            return True
        if history.current is not None and history.current.has_pods_of(version.objects):
            self.report("rollout.canary_percent: this version serves already")
            return True
        settings, labels = self.config.rollout, self.labels and functools.partial(self.labels, history.current, version)
        if history.current is not None and history.current.bundle == version.bundle:  # its metric is the same
            settings, labels = settings.model_copy(update={"min_labels": 0}), None
        options = [item for item in version.objects if item["kind"] == "ConfigMap"]
        self.cluster.apply([*secrets, *options], self.report, functools.partial(self._begin, version, restore=False))
        rollout = CanaryRollout(
            cluster=self.cluster,
            name=self.config.name,
            expected=expected,
            candidate=canary_deployment(version.objects),
            stable=history.live,
            settings=settings,
            timeout_seconds=self.config.deploy.timeout_seconds,
            headers=self.access.headers(),
            report=self.report,
            check_lease=self.check_lease,
            labels=labels,
        )
        try:
            result = rollout.run()
        except StageError:
            self._forget(version)
            raise
        if result.outcome == "roll back":
            self._forget(version)
            raise StageError(f"the canary was rolled back, the stable version gets all requests: {result.text}")
        return result.outcome == "promote"

    def _delete_unused(self) -> None:
        delete_unused(self.cluster, self.history, self.report, self.check_lease)

    def _read_digests(self, live: Object | None) -> frozenset[str]:
        """Return the bundles of all pods there are, and of the workload."""
        selector = format_selector(identity_labels(self.config.name, "serving"))
        owners = [*([live] if live else []), *self.cluster.select(selector)]
        annotations = (item["metadata"].get("annotations", {}) for item in owners)
        return frozenset(item[BUNDLE_ANNOTATION] for item in annotations if BUNDLE_ANNOTATION in item)

    def _wait_and_check(
        self, version: Version, expected: smoke.Expected, history: History, previous: frozenset[str]
    ) -> int:
        """Wait for the roll-out, end the canary, and send the golden requests; return their number."""
        self.cluster.wait(version.objects, self.config.deploy.timeout_seconds, self.report)
        if history.live_canary is not None:
            self.cluster.delete(_canary_object(self.config.name))
        if history.canary is not None and history.canary.number != version.number:
            delete_version(self.cluster, self.config.name, history.canary.number)
        service = serving.service_name(self.config)
        if not self.config.deploy.by_kserve and uses_tls(version.workload["spec"]["template"]["spec"]):
            service = f"https:{service}"
        return smoke.check_service(self.cluster, service, expected, self.report, self.access.headers(), previous)


def _canary_object(name: str) -> Object:
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": canary_name(name)}}


def _remaining_commands(config: Config, access: Access, directory: Path) -> str:
    """Return the commands that finish a deployment by hand."""
    create_command = network.create_secret_command(config, access)
    context = ["--context", config.deploy.context] if config.deploy.context else []
    apply_command = shlex.join(["kubectl", *context, "apply", "--server-side", "-k", str(directory)])
    create_secret = (
        f"create the Secret, which is in no manifest, with `{create_command}`, then " if create_command else ""
    )
    return f"{create_secret}apply them with `{apply_command}`"
