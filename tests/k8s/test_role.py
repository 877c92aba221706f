"""The Role of `k8s/access` against all that is really called: every flow under it, and nothing in it without need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from k8s import deploy
from k8s.cluster import canary, drift
from k8s.cluster.api import connect
from k8s.cluster.cluster import Cluster
from k8s.cluster.errors import Reasons
from k8s.objects.jobs import work
from k8s.objects.manifests import label
from k8s.objects.training import QUEUE_LABEL
from k8s.step_runner import Engine
from pipeline.contract.bundle import Bundle
from pipeline.contract.errors import StageError
from pipeline.contract.settings.access import Access
from pipeline.contract.settings.cluster import Rollout

from .api_server import Answer, ApiServer
from .cluster.test_trial import counting
from .conftest import Configure
from .schemas import validate

ACCESS = Path(__file__).resolve().parents[2] / "k8s" / "access"
IMAGE = f"registry.test/twice@sha256:{'0' * 64}"
OTHERS: dict[str, dict[str, Any]] = {
    "ingress": {"expose": "ingress", "service_monitor": True},
    "gateway": {"expose": "gateway", "gateway": "front"},
    "kserve": {"mode": "inferenceservice"},
    "storage": {"mode": "inferenceservice", "storage_uri": "pvc://bundles/twice"},
    "knative": {"mode": "inferenceservice", "kserve_mode": "Knative"},
}
ROLE = yaml.safe_load((ACCESS / "role.yaml").read_text())


def allowed() -> set[tuple[str, str, str]]:
    return {
        (group, resource, verb)
        for rule in ROLE["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


@pytest.fixture
def guarded(api: ApiServer, model: Callable[[str, Any], Answer], monkeypatch: pytest.MonkeyPatch) -> ApiServer:
    """As an administrator sets it up: the Role is all there is."""
    monkeypatch.setattr(canary.Trial, "sleep", lambda self, seconds: None)
    api.rules, api.unready_polls, api.nodes.replicas = ROLE["rules"], 0, 2
    api.service, api.pod = model, counting(model)
    api.crds |= {"serving.kserve.io/v1beta1", "serving.kserve.io/v1alpha1"}
    api.crds |= {"jobset.x-k8s.io/v1alpha2", "trainer.kubeflow.org/v1alpha1", "kueue.x-k8s.io/v1beta2"}
    api.crds |= {"serving.knative.dev/v1"}
    api.crds |= {"gateway.networking.k8s.io/v1", "monitoring.coreos.com/v1"}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "twice-runs"}, "spec": {}}
    api.add(claim)
    return api


def walk_steps(configure: Configure, folder: Path) -> None:
    others: list[dict[str, Any]] = [{"workload": workload} for workload in ("jobset", "trainjob")]
    for step, cluster in (("prepare", {}), *(("train", words) for words in ({}, *others))):
        config = configure(train={"image": IMAGE}, cluster=cluster)
        found = work(config, step, "run", "key", ("python", "-m", step, "runs/run"), {})
        engine = Engine(connect(""), "default", found, folder / step, folder / "log", 60, print, lambda: None)
        assert engine.find() is None
        engine.start()
        assert engine.follow().status == 0
        engine.start()
        engine.cancel()


def wait_in_line() -> None:
    """For room in a queue, and for pods that do not come."""
    metadata = {"name": "twice", "uid": "u", "labels": {QUEUE_LABEL: "team-a"}}
    for suspend in (True, False):
        job = {"kind": "Job", "metadata": metadata, "spec": {"suspend": suspend}}
        assert Reasons(connect(""), "default").of(job, []) == ()


def roll_out(configure: Configure, bundle: Bundle, api: ApiServer, folder: Path) -> None:
    (folder / "keys").write_text("a-key\n")
    entry = Access(api_keys=str(folder / "keys"))
    old = replace(bundle, digest="0" * 64)
    service, api.service = api.service, lambda path, body: (200, {}, service(path, body)[2])
    deploy.deploy(configure(), old, "twice:1", folder / "old", False, print, entry)
    config = configure().model_copy(update={"rollout": Rollout(canary=10, auto=True, observe_seconds=1)})
    deploy.deploy(config, bundle, "twice:2", folder / "new", False, print, entry)
    assert drift.look("", "default", folder / "new", bundle.digest) == drift.State("2 replicas available")
    deploy.end_canary(config, print)
    for name, words in OTHERS.items():
        deploy.deploy(configure(words), bundle, "twice:1", folder / name, False, print)


def get_stuck(configure: Configure, bundle: Bundle, api: ApiServer, folder: Path) -> None:
    """A pod that crashes: its log is looked at."""
    objects = drift.read_manifests(folder / "new")
    deployment = next(item for item in objects if item["kind"] == "Deployment")
    status = {"containerStatuses": [{"name": "server", "state": {"terminated": {"exitCode": 2, "reason": "Error"}}}]}
    api.add_pod("twice-crashed", deployment["metadata"]["labels"], {"phase": "Running", **status})
    api.unready_polls = 10**6
    with pytest.raises(StageError, match="twice-crashed: the container ended with Error, exit code 2"):
        Cluster.connect("").wait([deployment], "default", 0.05, print)


def test_the_role_allows_exactly_what_is_called(
    guarded: ApiServer, configure: Configure, bundle: Bundle, tmp_path: Path
) -> None:
    walk_steps(configure, tmp_path)
    wait_in_line()
    roll_out(configure, bundle, guarded, tmp_path)
    get_stuck(configure, bundle, guarded, tmp_path)
    assert guarded.seen - allowed() == set(), "called, but not allowed"
    assert allowed() - guarded.seen == set(), "allowed, but never called"


def test_a_verb_that_is_missing_is_told_as_the_rule_that_would_allow_it(
    guarded: ApiServer, configure: Configure, bundle: Bundle, tmp_path: Path
) -> None:
    guarded.rules = [rule for rule in ROLE["rules"] if "deployments" not in rule["resources"]]
    with pytest.raises(Exception, match=r'- apiGroups: \["apps"\]\n  resources: \["deployments"\]\n  verbs: \[get\]'):
        deploy.deploy(configure(), bundle, "twice:1", tmp_path, False, print)


@pytest.mark.parametrize("file", ["role.yaml", "rolebinding.yaml", "serviceaccount.yaml"])
def test_the_manifests_stand_by_themselves(file: str) -> None:
    item = yaml.safe_load((ACCESS / file).read_text())
    validate(item)
    assert label(item).endswith("/pipe")
    assert file in yaml.safe_load((ACCESS / "kustomization.yaml").read_text())["resources"]
