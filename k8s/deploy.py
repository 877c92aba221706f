"""From a bundle and an image to a proven service on a cluster, or to files ready to be applied."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k8s.cluster import canary, smoke
from k8s.cluster.canary import Trial, canary_name, deployment_of
from k8s.cluster.cluster import Change, Cluster, Lease, Say, holder
from k8s.objects import manifests, network, serving
from k8s.objects.kustomize import Object
from k8s.objects.manifests import BUNDLE_ANNOTATION, label
from pipeline.contract.bundle import Bundle
from pipeline.contract.config import Config
from pipeline.contract.errors import ClusterError, ConfigError, GateError, ResourceError, StageError
from pipeline.contract.override import passed_gate
from pipeline.contract.settings.access import ANYBODY, Access


@dataclass(frozen=True)
class Delivery:
    """One bundle on its way to a cluster."""

    config: Config
    bundle: Bundle
    objects: list[Object]
    entry: Access
    cluster: Cluster
    say: Say
    check: Callable[[], None]  # raises when somebody else deploys

    @property
    def namespace(self) -> str:
        return self.config.deploy.namespace

    @property
    def workload(self) -> Object:
        return next(item for item in self.objects if item["kind"] in ("Deployment", "InferenceService"))

    def roll(self) -> dict[str, Any]:
        """A canary first, where one is asked for; what it left behind is gone when all requests are given over."""
        serving = self.cluster.read(self.workload, self.namespace)
        if self.config.rollout.canary and (judged := self._try_beside(serving)) is not None:
            share = self.config.rollout.canary
            return {"canary": share, "canary_in_place": self._by_knative, "judged": judged, "applied": []}
        objects, rules = [*network.secrets(self.config, self.entry), *self.objects], self.config.rollout
        self.check()
        applied = self.cluster.apply(objects, self.namespace, self.say, rules.take_over)
        self.say(f"applied {', '.join(applied)}")
        try:
            asked = self._prove()
        except StageError as error:
            back = "; it is applied, and `pipe rollback` puts back what served before" if serving else ""
            raise StageError(f"{error}{back}") from error
        self.say(f"{asked} golden requests answered as at export")
        return {"canary": None, "applied": applied, "golden": {"requests": asked}}

    def _prove(self) -> int:
        self.cluster.wait(self.objects, self.namespace, self.config.deploy.timeout_seconds, self.say)
        self._end_canary()
        service = self._service()
        return smoke.check(self.cluster, self.namespace, service, self.bundle, self.say, self.entry.headers())

    def _service(self) -> str:
        """The one before the pods, as the API server's proxy names it."""
        if self._by_knative:
            return canary.service_of(self.cluster, self.workload, self.namespace)
        return ("https:" if self.entry.tls_key else "") + serving.service_name(self.config)

    @property
    def _by_knative(self) -> bool:
        deploy = self.config.deploy
        return deploy.mode == "inferenceservice" and deploy.kserve_mode == "Knative"

    def _try_beside(self, serving: Object | None) -> str | None:
        """How the canary was judged, where it stays beside the stable version; None when all may be given over."""
        if self.config.deploy.mode != "deployment" and not self._by_knative:
            raise ConfigError(
                "rollout.canary: KServe's Standard mode cannot be asked for one version alone; set "
                "deploy.kserve_mode=Knative or deploy.mode=deployment, or render a canary by deploy.canary_percent"
            )
        if serving is None:
            self.say("rollout.canary: nothing serves yet, so this bundle gets all requests")
            return None
        same = serving["metadata"].get("annotations", {}).get(BUNDLE_ANNOTATION) == self.bundle.digest
        if same and not (self._by_knative and canary.share_of(serving) is not None):
            self.say("rollout.canary: this bundle serves already")
            return None
        judged = self._trial(serving).walk()
        if judged.verdict == "go back":
            raise StageError(f"the canary has ended, the stable version serves all requests: {judged.text}")
        return judged.text if judged.verdict == "watch" else None

    def _trial(self, serving: Object) -> Trial:
        kind = canary.KnativeTrial if self._by_knative else Trial
        return kind(
            self.cluster,
            self.namespace,
            self.bundle,
            self.workload if self._by_knative else deployment_of(self.objects),
            serving,
            self.config.rollout,
            self.config.deploy.timeout_seconds,
            self.entry.headers(),
            bool(self.entry.tls_key),
            self.say,
            self.check,
        )

    def _end_canary(self) -> None:
        if self.config.deploy.mode == "deployment":
            self.cluster.delete(deployment_of(self.objects), self.namespace)


def deploy(
    config: Config,
    bundle: Bundle,
    image: str,
    directory: Path,
    render_only: bool,
    say: Say,
    entry: Access = ANYBODY,
) -> dict[str, Any]:
    """Render, plan, apply, wait, prove; returns what is worth recording."""
    check_verdict(bundle, config.rollout.force_reason)
    objects = serving.objects(config, bundle, image, entry)
    namespace = config.deploy.namespace
    files = manifests.write(objects, directory)
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
        "force_reason": config.rollout.force_reason,
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
    with lease_of(cluster, config).held(config.rollout.wait_seconds, say) as check:
        found = Delivery(config, bundle, objects, entry, cluster, say, check).roll()
    return {**record, **found, "context": cluster.context, "server": cluster.connection.server}


def preview(config: Config, bundle: Bundle, image: str, say: Say, entry: Access = ANYBODY) -> list[Change]:
    """What a deployment would change, by the API server's own word; nothing is written here or there."""
    check_verdict(bundle, config.rollout.force_reason)
    objects = [*network.secrets(config, entry), *serving.objects(config, bundle, image, entry)]
    cluster = Cluster.connect(config.deploy.context)
    say(f"looking at {cluster.describe()}, namespace {config.deploy.namespace}")
    if config.rollout.canary:
        say(f"a canary with {config.rollout.canary:g} % of the requests would come first; this is what all would get")
    for item in objects:
        if item["kind"] == "Secret":
            say(f"{label(item)} would be written anew; what is there now is never read")
    return cluster.plan(objects, config.deploy.namespace, config.rollout.take_over)


def lease_of(cluster: Cluster, config: Config) -> Lease:
    return Lease(cluster.connection, config.deploy.namespace, f"{config.name}-deploy", holder())


def check_verdict(bundle: Bundle, force_reason: str) -> None:
    """What the gate rejected does not serve, unless somebody says why it shall."""
    verdict = bundle.manifest.verdict
    if passed_gate(verdict) or force_reason:
        return
    raise GateError(
        f"{bundle.path}: its verdict is {verdict!r}; `--force-reason WHY` deploys it all the same, with that on record"
    )


def end_canary(config: Config, say: Say) -> None:
    """The stable version gets all requests again."""
    cluster = Cluster.connect(config.deploy.context)
    namespace = config.deploy.namespace
    say(f"on {cluster.describe()}, namespace {namespace}")
    made = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": canary_name(config.name)}}
    with lease_of(cluster, config).held(config.rollout.wait_seconds, say):
        cluster.delete(made, namespace)


def _by_hand(config: Config, entry: Access, directory: Path) -> str:
    """The commands that do what is left to do."""
    make, apply = network.command(config, entry), _command(config.deploy.context, directory)
    first = f"make the Secret, which is in no manifest, with `{make}`, then " if make else ""
    return f"{first}apply them with `{apply}`"


def _command(context: str, directory: Path) -> str:
    chosen = ["--context", context] if context else []
    return shlex.join(["kubectl", *chosen, "apply", "--server-side", "-k", str(directory)])
