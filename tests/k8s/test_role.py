"""The Role in k8s/manifests/access allows exactly the requests of all flows: no rule is missing, none is unused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from k8s import deploy
from k8s.cluster import drift
from k8s.cluster.api import connect
from k8s.cluster.cluster import Cluster
from k8s.cluster.pending_reasons import PendingReasons
from k8s.objects.jobs import step_job
from k8s.objects.training import QUEUE_LABEL
from k8s.step_runner import StepRunner
from pipeline.contract.bundle import Bundle
from pipeline.contract.settings.access import Access
from pipeline.contract.settings.cluster import Rollout
from pipeline.system.errors import StageError

from .api_server import ApiServer, Response
from .cluster.test_canary import counting_pods
from .conftest import Configure
from .objects.test_jobs import monitored
from .overlays import write_overlay

ACCESS = Path(__file__).resolve().parents[2] / "k8s" / "manifests" / "access"
IMAGE = f"registry.test/twice@sha256:{'0' * 64}"
OTHER_SETTINGS: dict[str, dict[str, Any]] = {
    "ingress": {"ingress_class": "default"},
    "gateway": {"gateway": "front"},
    "kserve": {"target": "kserve"},
    "storage": {"target": "kserve", "storage_uri": "pvc://bundles/twice"},
}
ROLE = yaml.safe_load((ACCESS / "role.yaml").read_text())


def allowed_requests() -> set[tuple[str, str, str]]:
    return {
        (group, resource, verb)
        for rule in ROLE["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


@pytest.fixture
def guarded(api: ApiServer, model: Callable[[str, Any], Response], no_observation: None) -> ApiServer:
    """Allow only what the Role allows."""
    api.rules, api.unready_polls, api.nodes.replicas = ROLE["rules"], 0, 2
    api.service, api.pod = model, counting_pods(model)
    api.crds |= {"serving.kserve.io/v1beta1", "serving.kserve.io/v1alpha1"}
    api.crds |= {"jobset.x-k8s.io/v1alpha2", "trainer.kubeflow.org/v1alpha1", "kueue.x-k8s.io/v1beta2"}
    api.crds |= {"gateway.networking.k8s.io/v1", "monitoring.coreos.com/v1", "keda.sh/v1alpha1"}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "twice-runs"}, "spec": {}}
    api.add(claim)
    return api


def run_steps(configure: Configure, folder: Path) -> None:
    others: list[dict[str, Any]] = [{"workload": workload} for workload in ("jobset", "trainjob")]
    for step, cluster in (("prepare", {}), *(("train", settings) for settings in ({}, *others))):
        config = configure(train={"image": IMAGE}, cluster=cluster)
        job = step_job(config, step, "run", "key", ("python", "-m", step, "runs/run"), {})
        runner = StepRunner(connect(""), "default", job, folder / step, folder / "log", 60, print, lambda: None)
        assert runner.find() is None
        runner.start()
        assert runner.follow().status == 0
        runner.start()
        runner.cancel()


def read_pending_reasons() -> None:
    """Read the reasons of a job in a queue and of one without pods."""
    metadata = {"name": "twice", "uid": "u", "labels": {QUEUE_LABEL: "team-a"}}
    for suspend in (True, False):
        job = {"kind": "Job", "metadata": metadata, "spec": {"suspend": suspend}}
        assert PendingReasons(connect(""), "default").get(job, []) == ()


def roll_out(configure: Configure, bundle: Bundle, api: ApiServer, folder: Path) -> None:
    (folder / "keys").write_text("a-key\n")
    access = Access(api_keys=str(folder / "keys"))
    old = replace(bundle, digest="0" * 64)
    service, api.service = api.service, lambda path, body: (200, {}, service(path, body)[2])
    deploy.deploy(configure(), old, "twice:1", folder / "old", False, print, access)
    config = configure().model_copy(update={"rollout": Rollout(canary_percent=10, auto=True, observe_seconds=1)})
    deploy.deploy(config, bundle, "twice:2", folder / "new", False, print, access)
    cluster = Cluster.connect("", "default")
    state = drift.inspect_deployment(cluster, deploy.read_versions(cluster, config))
    assert state == drift.DeploymentState("2 replicas available")
    (folder / "keys").write_text("a-key\nanother-key\n")
    other = configure(serve={"log_requests": 0.5}).model_copy(update={"rollout": Rollout(canary_percent=10)})
    deploy.deploy(other, bundle, "twice:2", folder / "other", False, print, access)
    deploy.roll_back(config, access, print, lambda version: None)
    for name, settings in OTHER_SETTINGS.items():
        deploy.deploy(configure(settings), bundle, "twice:1", folder / name, False, print)
    deploy.deploy(monitored(configure), bundle, "twice:1", folder / "monitored", False, print)
    deploy.deploy(configure(), bundle, "twice:1", folder / "plain", False, print)
    overlay = write_overlay(folder / "component")
    deploy.deploy(configure(), bundle, "twice:1", folder / "overlay", False, print, overlay=overlay)
    deploy.deploy(configure(), bundle, "twice:1", folder / "again", False, print)


def get_stuck(configure: Configure, bundle: Bundle, api: ApiServer, folder: Path) -> None:
    """Wait for a pod that crashes, whose log is read."""
    current = deploy.read_versions(Cluster.connect("", "default"), configure()).current
    assert current is not None
    deployment = current.workload
    status = {"containerStatuses": [{"name": "server", "state": {"terminated": {"exitCode": 2, "reason": "Error"}}}]}
    api.add_pod("twice-crashed", deployment["metadata"]["labels"], {"phase": "Running", **status})
    api.unready_polls = 10**6
    with pytest.raises(StageError, match="twice-crashed: the container ended with Error, exit code 2"):
        Cluster.connect("", "default").wait([deployment], 0.05, print)


def test_the_role_allows_exactly_what_is_called(
    guarded: ApiServer, configure: Configure, bundle: Bundle, tmp_path: Path
) -> None:
    run_steps(configure, tmp_path)
    read_pending_reasons()
    roll_out(configure, bundle, guarded, tmp_path)
    get_stuck(configure, bundle, guarded, tmp_path)
    assert guarded.seen - allowed_requests() == set(), "called, but not allowed"
    assert allowed_requests() - guarded.seen == set(), "allowed, but never called"


def test_a_missing_verb_is_reported_as_a_role_rule(
    guarded: ApiServer, configure: Configure, bundle: Bundle, tmp_path: Path
) -> None:
    guarded.rules = [rule for rule in ROLE["rules"] if "deployments" not in rule["resources"]]
    with pytest.raises(Exception, match=r'- apiGroups: \["apps"\]\n  resources: \["deployments"\]\n  verbs: \[get\]'):
        deploy.deploy(configure(), bundle, "twice:1", tmp_path, False, print)
