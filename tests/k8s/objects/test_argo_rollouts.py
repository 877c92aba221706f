"""A Rollout of Argo Rollouts in place of the Deployment: its structure, as no controller runs here."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from k8s import deploy
from k8s.objects import serving
from k8s.objects.manifests import write_manifests
from pipeline.contract.bundle import Bundle
from pipeline.contract.config import Config
from pipeline.contract.settings.access import OPEN_ACCESS, Access
from pipeline.contract.settings.cluster import Rollout
from pipeline.system.errors import ConfigError

from ..api_server import ApiServer
from ..conftest import Configure
from ..invariants import check_pods
from ..schemas import validate, validate_builtin

IMAGE = "registry.example:5000/twice:1"
CANARY = {"canary_percent": 10, "auto": True}
Objects = dict[str, dict[str, Any]]


def with_argo(config: Config, **rollout: Any) -> Config:
    return config.model_copy(update={"rollout": Rollout(controller="argo-rollouts", **rollout)})


def render(config: Config, bundle: Bundle, access: Access = OPEN_ACCESS) -> Objects:
    """Return the objects by kind and name."""
    items = serving.serving_objects(config, bundle, IMAGE, access)
    return {f"{item['kind']}/{item['metadata']['name']}": item for item in items}


def job_of(objects: Objects) -> dict[str, Any]:
    (metric,) = objects["AnalysisTemplate/twice"]["spec"]["metrics"]
    job: dict[str, Any] = metric["provider"]["job"]["spec"]
    return job


@pytest.mark.parametrize("settings", [{}, {"gateway": "edge", "clients": ["shop"]}, {"gpus": 1, "memory": "8Gi"}])
def test_the_rollout_has_the_pods_and_the_scale_of_the_deployment(
    settings: dict[str, Any], configure: Configure, bundle: Bundle
) -> None:
    deployment = render(configure(settings), bundle)["Deployment/twice"]
    objects = render(with_argo(configure(settings), **CANARY), bundle)
    rollout = objects.pop("Rollout/twice")
    template = objects.pop("AnalysisTemplate/twice")
    assert not [name for name in objects if name.startswith("Deployment")]
    assert (rollout["apiVersion"], template["apiVersion"]) == ("argoproj.io/v1alpha1", "argoproj.io/v1alpha1")
    different = {"strategy", "progressDeadlineAbort"}
    assert {name: value for name, value in rollout["spec"].items() if name not in different} == {
        name: value for name, value in deployment["spec"].items() if name not in different
    }
    scaler = objects["HorizontalPodAutoscaler/twice"]["spec"]["scaleTargetRef"]
    assert scaler == {"apiVersion": "argoproj.io/v1alpha1", "kind": "Rollout", "name": "twice"}
    check_pods([rollout, template])
    for item in objects.values():
        validate(item)


def test_the_canary_is_judged_at_its_percentage_and_at_half(configure: Configure, bundle: Bundle) -> None:
    objects = render(with_argo(configure(), observe_seconds=30, margin=0.02, min_requests=50, **CANARY), bundle)
    analysis = {"analysis": {"templates": [{"templateName": "twice"}]}}
    assert objects["Rollout/twice"]["spec"]["strategy"]["canary"] == {
        "maxUnavailable": 0,
        "maxSurge": 1,
        "stableService": "twice-stable",
        "canaryService": "twice-canary",
        "steps": [{"setWeight": 10}, analysis, {"setWeight": 50}, analysis],
    }
    job = job_of(objects)
    validate_builtin({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "run"}, "spec": job})
    assert (job["backoffLimit"], job["activeDeadlineSeconds"]) == (0, 750)
    (container,) = job["template"]["spec"]["containers"]
    assert (container["image"], container["command"]) == (IMAGE, ["python", "-m", "serve.canary"])
    assert container["args"] == [
        "--stable=twice-stable:8080", "--canary=twice-canary:8080", "--name=twice", "--min-requests=50",
        "--margin=0.02", "--observe-seconds=30",
    ]  # fmt: skip


def test_without_auto_a_person_promotes_the_canary(configure: Configure, bundle: Bundle) -> None:
    objects = render(with_argo(configure(), canary_percent=2.5), bundle)
    assert objects["Rollout/twice"]["spec"]["strategy"]["canary"]["steps"] == [{"setWeight": 2}, {"pause": {}}]
    assert "AnalysisTemplate/twice" not in objects
    everything = render(with_argo(configure()), bundle)["Rollout/twice"]
    assert "steps" not in everything["spec"]["strategy"]["canary"], "rollout.canary_percent: 0"


def test_the_controller_alone_selects_the_pods_of_a_version(configure: Configure, bundle: Bundle) -> None:
    """A selector of ours would take the controller's away at every apply."""
    objects = render(with_argo(configure(), **CANARY), bundle)
    every = objects["Service/twice"]
    for name in ("Service/twice-stable", "Service/twice-canary"):
        service = objects[name]
        assert service["spec"]["clusterIP"] == "None"
        assert "selector" not in service["spec"]
        assert service["spec"]["ports"] == every["spec"]["ports"]
        assert not every["spec"]["selector"].items() <= service["metadata"]["labels"].items(), "scraped twice"
    labels = job_of(objects)["template"]["metadata"]["labels"]
    assert not every["spec"]["selector"].items() <= labels.items(), "the Job's pod would get requests"


def test_a_gateway_splits_requests_by_the_weights_of_the_route(configure: Configure, bundle: Bundle) -> None:
    objects = render(with_argo(configure({"gateway": "infra/edge", "clients": ["shop"]}), **CANARY), bundle)
    canary = objects["Rollout/twice"]["spec"]["strategy"]["canary"]
    assert canary["trafficRouting"] == {"plugins": {"argoproj-labs/gatewayAPI": {"httpRoute": "twice"}}}
    (rule,) = objects["HTTPRoute/twice"]["spec"]["rules"]
    weights = {backend["name"]: backend["weight"] for backend in rule["backendRefs"]}
    assert weights == {canary["stableService"]: 100, canary["canaryService"]: 0}
    peers = objects["NetworkPolicy/twice"]["spec"]["ingress"][0]["from"]
    assert {"podSelector": {"matchLabels": job_of(objects)["template"]["metadata"]["labels"]}} in peers


def test_the_job_reads_metrics_with_the_key_and_the_certificate(
    configure: Configure, bundle: Bundle, tmp_path: Path
) -> None:
    for name in ("keys", "tls.crt", "tls.key"):
        (tmp_path / name).write_text("secret\n")
    files = {name: str(tmp_path / file) for name, file in (("api_keys", "keys"), ("tls_certificate", "tls.crt"))}
    access = Access(**files, tls_key=str(tmp_path / "tls.key"))
    objects = render(with_argo(configure(), **CANARY), bundle, access)
    check_pods([objects["AnalysisTemplate/twice"]])
    (container,) = job_of(objects)["template"]["spec"]["containers"]
    serving_container = objects["Rollout/twice"]["spec"]["template"]["spec"]["containers"][0]
    assert container["args"][-6:] == serving_container["args"][-6:]
    assert container["env"][0]["valueFrom"] == {"secretKeyRef": {"name": "twice-canary", "key": "PIPE_API_KEY"}}


def test_every_object_has_its_own_file(configure: Configure, bundle: Bundle, tmp_path: Path) -> None:
    objects = render(with_argo(configure(), **CANARY), bundle)
    assert len(write_manifests(objects.values(), tmp_path)) == len(objects) + 1


def test_kserve_and_deployments_by_pipe_are_refused(
    configure: Configure, bundle: Bundle, api: ApiServer, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.controller: with KServe"):
        render(with_argo(configure({"target": "kserve"})), bundle)
    with pytest.raises(ConfigError, match=r"rollout\.min_labels: only `pipe deploy` reads labels"):
        render(with_argo(configure(), min_labels=5), bundle)
    with pytest.raises(ConfigError, match="use `pipe deploy --render`"):
        deploy.deploy(with_argo(configure()), bundle, IMAGE, tmp_path, False, print)
    assert not [path for path in api.objects if "leases" not in path]


@pytest.mark.parametrize(
    ("path", "refused"), [("/spec/strategy/canary/maxSurge", False), ("/spec/template/spec/containers/0/image", True)]
)
def test_an_overlay_changes_the_strategy_and_not_the_image(
    path: str, refused: bool, configure: Configure, bundle: Bundle, tmp_path: Path
) -> None:
    patch = f"[{{op: replace, path: {path}, value: other}}]"
    (tmp_path / "kustomization.yaml").write_text(f"patches: [{{target: {{kind: Rollout}}, patch: '{patch}'}}]\n")
    with pytest.raises(ConfigError, match="which pipe sets") if refused else nullcontext():
        serving.serving_objects(with_argo(configure(), **CANARY), bundle, IMAGE, overlay=tmp_path)
