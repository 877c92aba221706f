"""Training as an Indexed Job of two pods, of which one is killed in the middle."""

from __future__ import annotations

import os
from typing import Any

import pytest

from k8s.objects.training import training_objects
from pipeline.history import Project, example_folder

from .place import Place, Reports, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.usefixtures("nodes")]

TIMEOUT_SECONDS = 600
LOGGED_EPOCH = "epoch 2/"  # before the pod is killed


def claim(namespace: str) -> dict[str, Any]:
    """Return a claim for a cluster whose volumes belong to one node."""
    return {
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "runs", "namespace": namespace},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }  # fmt: skip


def test_training_finishes_after_a_pod_was_killed(place: Place, reports: Reports) -> None:
    image = os.environ.get("PIPE_TEST_TRAIN_IMAGE")
    if not image:
        pytest.skip("needs PIPE_TEST_TRAIN_IMAGE, the image of the example `starter`")
    settings = [
        "train.nodes=2", "train.epochs=200", f"train.image={image}", f"deploy.namespace={place.namespace}",
        "cluster.volume_claim=runs", "cluster.cpu=100m",
    ]  # fmt: skip
    config = Project(example_folder("starter"), place.folder / "runs").config(settings)
    objects = training_objects(config, "/project/runs/run-1", standalone=True)
    place.cluster.apply([claim(place.namespace), *objects], reports)
    job = objects[-1]
    selector = f"batch.kubernetes.io/job-name={job['metadata']['name']}"

    def status() -> dict[str, object]:
        live = place.cluster.read(job)
        assert live is not None
        failed = any(condition["type"] == "Failed" for condition in live["status"].get("conditions", ()))
        assert not failed, [log(pod["metadata"]["name"]) for pod in place.pods(selector)]
        return dict(live["status"])

    def log(pod: str) -> str:
        path = f"/api/v1/namespaces/{place.namespace}/pods/{pod}/log"
        return place.request("GET", path).body.decode(errors="replace")

    def is_training() -> bool:
        """Return whether a pod has logged the epoch: the one with rank 0, which can be either."""
        status()
        return any(LOGGED_EPOCH in log(pod["metadata"]["name"]) for pod in place.pods(selector))

    wait_until(is_training, LOGGED_EPOCH, TIMEOUT_SECONDS)
    killed = max(pod["metadata"]["name"] for pod in place.pods(selector))
    place.delete_pod(killed, 0)
    wait_until(lambda: status().get("succeeded") == 2, "the end of training", TIMEOUT_SECONDS)
    assert killed not in {pod["metadata"]["name"] for pod in place.pods(selector)}
