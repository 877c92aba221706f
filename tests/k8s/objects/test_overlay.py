"""`deploy.overlay` and `cluster.overlay`: changes of a project to objects, and changes that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from k8s.cluster.rollout_status import minimum_replicas
from k8s.objects import serving
from k8s.objects.jobs import step_job
from k8s.objects.manifests import write_manifests
from k8s.objects.overlay import overlay_digest, overlay_folder
from pipeline.contract.bundle import Bundle
from pipeline.system.errors import ConfigError

from ..conftest import Configure
from ..invariants import check
from ..overlays import write_overlay
from ..schemas import validate

IMAGE = f"registry.example/twice@sha256:{'0' * 64}"


def objects(configure: Configure, bundle: Bundle, overlay: Path, **deploy: Any) -> dict[str, Any]:
    made = serving.serving_objects(configure(deploy), bundle, IMAGE, overlay=overlay)
    return {item["kind"]: item for item in made}


def test_objects_are_added_and_replaced(configure: Configure, bundle: Bundle, tmp_path: Path) -> None:
    parts = objects(configure, bundle, write_overlay(tmp_path), namespace="models")
    for item in parts.values():
        validate(item)
    check([*parts.values()])
    assert "HorizontalPodAutoscaler" not in parts
    assert minimum_replicas(parts["Deployment"], [*parts.values()]) == 1
    metadata = parts["ServiceMonitor"]["metadata"]
    assert metadata["namespace"] == "models"
    assert metadata["labels"] == {
        "release": "prometheus",
        "app.kubernetes.io/name": "twice",
        "app.kubernetes.io/component": "serving",
    }


INGRESS = """\
patches:
  - patch: |
      apiVersion: networking.k8s.io/v1
      kind: Ingress
      metadata: {name: twice, annotations: {a.example/b: c}}
  - target: {kind: Ingress}
    patch: '[{op: add, path: /spec/tls, value: [{secretName: cert}]}]'
  - target: {kind: Deployment}
    patch: |
      - {op: add, path: /spec/template/spec/containers/-, value: {name: side, image: "side:1"}}
      - {op: add, path: /spec/template/metadata/labels/team, value: search}
labels:
  - pairs: {team: search}
"""


def test_fields_that_no_setting_names_are_changed(configure: Configure, bundle: Bundle, tmp_path: Path) -> None:
    parts = objects(configure, bundle, write_overlay(tmp_path, INGRESS), ingress_class="nginx")
    assert parts["Ingress"]["metadata"]["annotations"]["a.example/b"] == "c"
    assert "nginx.ingress.kubernetes.io/proxy-body-size" in parts["Ingress"]["metadata"]["annotations"]
    assert parts["Ingress"]["spec"]["tls"] == [{"secretName": "cert"}]
    pod = parts["Deployment"]["spec"]["template"]
    assert [container["name"] for container in pod["spec"]["containers"]] == ["server", "side"]
    assert {item["metadata"]["labels"]["team"] for item in parts.values()} == {"search"}


def patch(kind: str, *operations: str) -> str:
    return f"patches:\n  - target: {{kind: {kind}}}\n    patch: '[{', '.join(operations)}]'\n"


def delete(version: str, kind: str) -> str:
    text = f"$patch: delete\n      apiVersion: {version}\n      kind: {kind}\n      metadata: {{name: twice}}"
    return f"patches:\n  - patch: |\n      {text}\n"


CONTAINER = "/spec/template/spec/containers/0"
REFUSED = {
    "image": patch("Deployment", f"{{op: replace, path: {CONTAINER}/image, value: other}}"),
    "image by name": "images: [{name: registry.example/twice, newName: other}]\n",
    "bundle": patch("Deployment", "{op: remove, path: /spec/template/metadata/annotations/pipe-road~1bundle}"),
    "options": patch("Deployment", f"{{op: remove, path: {CONTAINER}/envFrom}}"),
    "selector": patch("Deployment", "{op: add, path: /spec/selector/matchLabels/a, value: b}"),
    "labels of pods": patch("Deployment", "{op: replace, path: /spec/template/metadata/labels, value: {}}"),
    "first container": patch("Deployment", f"{{op: add, path: {CONTAINER}, value: {{name: a, image: a}}}}"),
    "workload": delete("apps/v1", "Deployment"),
    "policy": delete("networking.k8s.io/v1", "NetworkPolicy"),
    "pods of the policy": patch("NetworkPolicy", "{op: replace, path: /spec/podSelector, value: {}}"),
    "egress of the policy": patch("NetworkPolicy", "{op: replace, path: /spec/policyTypes, value: [Ingress]}"),
    "service": patch("Service", "{op: replace, path: /spec/selector, value: {}}"),
    "namespace": patch("Deployment", "{op: replace, path: /metadata/namespace, value: other}"),
    "unknown field": "namePrefix: a-\n",
    "no object": patch("Ingress", "{op: add, path: /spec/tls, value: []}"),
    "missing file": "resources: [none.yaml]\n",
    "selectors": "labels: [{pairs: {a: b}, includeSelectors: true}]\n",
}


@pytest.mark.parametrize("what", REFUSED)
def test_overlay_cannot_change_what_the_deployment_relies_on(
    what: str, configure: Configure, bundle: Bundle, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"^deploy\.overlay: "):
        objects(configure, bundle, write_overlay(tmp_path, REFUSED[what]))


def test_an_object_in_another_namespace_is_refused(configure: Configure, bundle: Bundle, tmp_path: Path) -> None:
    folder = write_overlay(tmp_path)
    monitor = folder / "monitor.yaml"
    monitor.write_text(monitor.read_text().replace("{name: twice,", "{name: twice, namespace: monitoring,"))
    with pytest.raises(ConfigError, match="is in namespace monitoring, the service in default"):
        objects(configure, bundle, folder)


def test_overlay_folder_is_found_in_the_project(configure: Configure, tmp_path: Path) -> None:
    assert overlay_folder(tmp_path, configure()) is None
    with pytest.raises(ConfigError, match=r"deploy\.overlay: no kustomization\.yaml in .*cluster"):
        overlay_folder(tmp_path, configure({"overlay": "cluster"}))
    folder = write_overlay(tmp_path / "cluster")
    assert overlay_folder(tmp_path, configure({"overlay": "cluster"})) == folder
    before = overlay_digest(folder)
    (folder / "monitor.yaml").write_text("")
    assert overlay_digest(folder) not in (before, overlay_digest(None))


def test_added_objects_are_rendered(configure: Configure, bundle: Bundle, tmp_path: Path) -> None:
    made = serving.serving_objects(configure(), bundle, IMAGE, overlay=write_overlay(tmp_path / "overlay"))
    names = {file.name for file in write_manifests(made, tmp_path / "manifests")}
    assert {"servicemonitor-twice.yaml", "scaledobject-twice.yaml"} <= names


PODS = """\
apiVersion: kustomize.config.k8s.io/v1alpha1
kind: Component
patches:
  - target: {kind: Job}
    patch: |
      - {op: add, path: /spec/template/spec/volumes/-, value: {name: data, persistentVolumeClaim: {claimName: data}}}
      - {op: add, path: /spec/template/spec/containers/0/volumeMounts/-, value: {name: data, mountPath: /data}}
  - target: {kind: Job, labelSelector: app.kubernetes.io/component=training}
    patch: |
      - {op: add, path: /spec/template/spec/containers/0/resources/limits/rdma~1hca, value: 1}
      - {op: add, path: /spec/template/spec/containers/0/securityContext/capabilities/add, value: [IPC_LOCK]}
"""
TRAINING = {"image": IMAGE, "nodes": 2, "device": "cuda"}


def write_component(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "kustomization.yaml").write_text(text)
    return folder


@pytest.mark.parametrize("workload", ["job", "jobset", "trainjob"])
@pytest.mark.parametrize("step", ["prepare", "train"])
def test_overlay_of_the_cluster_reaches_the_pods_of_each_step(
    configure: Configure, tmp_path: Path, step: str, workload: str
) -> None:
    config = configure(train=TRAINING, cluster={"workload": workload})
    made = step_job(config, step, "r1", "k", ("x", "runs/r1"), {}, overlay=write_component(tmp_path / "pods", PODS))
    for item in made.objects:
        validate(item)
    text = json.dumps(made.objects)
    assert '"claimName": "data"' in text
    assert '"mountPath": "/data"' in text
    assert ('"rdma/hca": 1' in text) == ('"IPC_LOCK"' in text) == (step == "train")


@pytest.mark.parametrize(
    ("patch", "problem"),
    [
        ("{op: add, path: /spec/completions, value: 3}", "changes spec.completions of job/twice-prepare-"),
        ("{op: remove, path: /spec/template/metadata/labels}", "changes spec.template.metadata.labels of job/"),
        (
            "{op: replace, path: /spec/template/spec/containers/0/command, value: [sh]}",
            "changes spec.template.spec.con",
        ),
        ("{op: add, path: /spec/nowhere/x, value: 1}", "add /spec/nowhere/x: there is no nowhere"),
    ],
    ids=["pods", "labels", "command", "path"],
)
def test_overlay_of_the_cluster_cannot_change_what_a_step_relies_on(
    configure: Configure, tmp_path: Path, patch: str, problem: str
) -> None:
    text = f"kind: Component\npatches:\n  - target: {{kind: Job}}\n    patch: '[{patch}]'\n"
    overlay = write_component(tmp_path / "pods", text)
    with pytest.raises(ConfigError, match=rf"^cluster\.overlay: .*{problem}"):
        step_job(configure(train=TRAINING), "prepare", "r1", "k", ("x", "runs/r1"), {}, overlay=overlay)
