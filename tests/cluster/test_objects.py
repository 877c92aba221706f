"""An API server accepts every rendered object with strict validation, in a `restricted` namespace, without warnings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from k8s.cluster.api import Response, api_path, response_warnings
from k8s.cluster.canary import canary_deployment
from k8s.cluster.cluster import APPLY_CONTENT_TYPE, APPLY_QUERY
from k8s.objects.jobs import step_job
from k8s.objects.kustomize import Object, build
from k8s.objects.serving import serving_objects
from k8s.objects.training import training_objects
from pipeline.contract.config import Config
from pipeline.system.sources import SOURCE_ROOT
from tests.k8s.overlays import write_overlay

from .place import Place

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.usefixtures("supported")]

MANIFESTS = SOURCE_ROOT / "k8s" / "manifests"
FOLDERS = sorted({file.parent for file in MANIFESTS.rglob("kustomization.yaml") if "components" not in file.parts})
IMAGE = f"registry.example/twice@sha256:{'0' * 64}"
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "exposed": {"ingress_class": "default", "hostname": "twice.example"},
    "gateway": {"gateway": "infra/edge", "hostname": "twice.example"},
    "scaled": {"target_concurrency": 8},
    "network": {"clients": ["shop"], "egress": ["10.0.0.0/8:4318"]},
    "gpu": {"gpus": 1, "tolerations": ["pool=gpus:NoSchedule"]},
    "kserve": {"target": "kserve"},
    "storage": {"target": "kserve", "storage_uri": "pvc://bundles/twice"},
}


def dry_run(place: Place, item: Object) -> Response:
    """Apply one object without storing it."""
    item["metadata"]["namespace"] = place.namespace
    path = api_path(item, place.namespace, item["metadata"]["name"])
    query = {**APPLY_QUERY, "dryRun": "All"}
    return place.cluster.connection.request("PATCH", path, query, json.dumps(item).encode(), APPLY_CONTENT_TYPE)


def check_accepted(place: Place, objects: list[Object]) -> None:
    """Check all objects whose API the server has; skip if it has none of them."""
    accepted, absent = 0, set()
    for item in objects:
        api_version = item["apiVersion"]
        root = f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"
        if place.request("GET", root).status == 404:
            absent.add(api_version)
            continue
        response = dry_run(place, item)
        assert response.ok, f"{item['kind']}: {response.reason}"
        assert response_warnings(response) == [], item["kind"]
        accepted += 1
    print(f"{accepted} of {len(objects)} objects accepted")
    if absent:
        print(f"the cluster has no {', '.join(sorted(absent))}")
    if not accepted:
        pytest.skip(f"the cluster has no {', '.join(sorted(absent))}")


def training_config(place: Place, workload: str) -> Config:
    config = place.config()
    cluster = config.cluster.model_copy(update={"workload": workload})
    train = config.train.model_copy(update={"nodes": 2, "image": IMAGE})
    return config.model_copy(update={"cluster": cluster, "train": train})


@pytest.mark.parametrize("name", SETTINGS)
def test_serving_objects_are_accepted(place: Place, name: str) -> None:
    objects = serving_objects(place.config(SETTINGS[name]), place.bundles["stable"], IMAGE)
    if "target" not in SETTINGS[name]:
        objects.append(canary_deployment(objects))
    check_accepted(place, objects)


def test_serving_objects_with_an_overlay_are_accepted(place: Place, tmp_path: Path) -> None:
    overlay = write_overlay(tmp_path / "overlay")
    check_accepted(place, serving_objects(place.config(), place.bundles["stable"], IMAGE, overlay=overlay))


@pytest.mark.parametrize("workload", ["job", "jobset", "trainjob"])
@pytest.mark.parametrize("standalone", [False, True])
def test_training_objects_are_accepted(place: Place, workload: str, standalone: bool) -> None:
    config = training_config(place, workload)
    check_accepted(place, training_objects(config, "/project/runs/run-1", standalone=standalone))


@pytest.mark.parametrize("step", ["prepare", "train", "evaluate", "export", "deploy"])
def test_step_objects_are_accepted(place: Place, step: str) -> None:
    argv = ("python", "-m", f"pipeline.steps.{step}", "runs/run-1")
    job = step_job(training_config(place, "job"), step, "run-1", "k" * 64, argv, {"PYTHONSAFEPATH": "1"})
    check_accepted(place, list(job.objects))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(MANIFESTS)))
def test_manifests_without_pipe_are_accepted(place: Place, folder: Path) -> None:
    check_accepted(place, build(folder))


def test_misspelt_field_is_refused(place: Place) -> None:
    objects = serving_objects(place.config(), place.bundles["stable"], IMAGE)
    item = next(item for item in objects if item["kind"] == "Service")
    item["spec"]["sessionAfinity"] = "None"
    response = dry_run(place, item)
    assert not response.ok
    assert "sessionAfinity" in response.reason
