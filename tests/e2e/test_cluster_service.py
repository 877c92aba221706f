"""Deployment, promotion, rollback and status on the API server of the tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.contract.bundle import Bundle
from pipeline.contract.run import all_runs

from ..k8s.api_server import ApiServer, Response
from .project_folder import ProjectFolder

ON_CLUSTER = ("deploy.target=kubernetes", f"deploy.image=registry.test/sides@sha256:{'0' * 64}")
DEPLOYMENT = "/apis/apps/v1/namespaces/default/deployments/sides"
NEXT = ("train.seed=1", "train.processes=1", "evaluate.margin=0.5")

pytestmark = pytest.mark.long


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    server = ApiServer()
    server.unready_polls = 0
    server.write_kubeconfig(tmp_path / "kubeconfig")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    yield server
    server.close()


def answers(bundle: Bundle, path: str) -> Response:
    """Answer the golden requests of a bundle as its pods do."""
    golden, header = bundle.golden(), {"x-bundle-digest": bundle.digest}
    if path.startswith("/v1/"):
        return 200, header, {"predictions": golden.predictions}
    outputs = [
        {"name": name, "shape": list(array.shape), "data": array.ravel().tolist()}
        for name, array in golden.outputs.items()
    ]
    return 200, header, {"outputs": outputs}


def serving(api: ApiServer, project: ProjectFolder, name: str = "sides") -> Bundle:
    """Return the bundle of a Deployment's pods."""
    path = f"/apis/apps/v1/namespaces/default/deployments/{name}"
    digest = api.objects[path]["metadata"]["annotations"]["pipe-road/bundle"]
    bundles = (run.bundle() for run in all_runs(project.runs) if run.bundle_path.is_dir())
    return next(bundle for bundle in bundles if bundle.digest == digest)


def cluster_of(project: ProjectFolder) -> dict[str, Any]:
    (found,) = json.loads(project.pipe("status", "-o", "json").stdout)["clusters"]
    return dict(found)


def test_bundle_is_deployed_replaced_tried_as_canary_and_rolled_back(api: ApiServer, copied: ProjectFolder) -> None:
    first = copied.latest
    api.service = lambda path, body: answers(serving(api, copied), path)
    done = copied.pipe("deploy", first.id, *ON_CLUSTER)
    assert f"deploying to context small, server {api.url}" in done.stderr
    assert "plan: deployment/sides: new" in done.stderr
    assert "there is nothing to roll back to" in copied.pipe("registry", "rollback", expect=2).stderr

    copied.pipe("run", "--until", "package", *NEXT, *ON_CLUSTER)
    second = copied.latest
    stdout = copied.pipe("deploy", second.id, *ON_CLUSTER, "--dry-run", "--exit-code", expect=4).stdout
    assert f"pipe-road/bundle: {first.bundle().digest} → {second.bundle().digest}" in stdout
    assert f" → {second.bundle().digest}" in copied.pipe("run", "deploy", "--dry-run", *ON_CLUSTER, *NEXT).stdout
    copied.pipe("run", "--until", "export", *NEXT)
    done = copied.pipe("deploy", *ON_CLUSTER, "--dry-run", "--exit-code", expect=4)
    assert f"has no finished package; run {second.id} has one of the same bundle" in done.stderr
    assert serving(api, copied).digest == first.bundle().digest, "nothing was deployed"
    copied.pipe("deploy", second.id, *ON_CLUSTER)
    assert copied.pipe("deploy", *ON_CLUSTER, "--dry-run", "--exit-code").stdout == "nothing would change\n"
    found = cluster_of(copied)
    assert (found["current"]["bundle"], found["previous"]["bundle"]) == (second.bundle().digest, first.bundle().digest)
    assert found["drift"] == []

    copied.pipe("registry", "rollback")
    assert serving(api, copied).digest == first.bundle().digest

    api.nodes.replicas = 2
    api.pod = lambda pod, path, body: answers(serving(api, copied, "sides-canary"), path)
    done = copied.pipe("deploy", second.id, *ON_CLUSTER, "--canary", "50", "--watch")
    assert f"new bundle {second.bundle().digest[:12]}  2 of 2 ready" in done.stderr
    assert "canary: 2 pods next to 2 get about 50 % of the connections" in done.stderr
    assert cluster_of(copied)["canary"]["bundle"] == second.bundle().digest
    assert serving(api, copied).digest == first.bundle().digest

    copied.pipe("registry", "promote")
    assert serving(api, copied).digest == second.bundle().digest
    assert not [path for path in api.objects if path.endswith("sides-canary")]
    assert cluster_of(copied)["canary"] is None
    api.store.change(DEPLOYMENT, lambda item: item["spec"].update(progressDeadlineSeconds=7))
    assert "deployment/sides: spec.progressDeadlineSeconds: 7 → 900" in cluster_of(copied)["drift"]

    api.namespaces.add("production")
    api.service = lambda path, body: answers(first.bundle(), path)
    copied.pipe("deploy", first.id, *ON_CLUSTER, "deploy.namespace=production")
    copied.pipe("deploy", *ON_CLUSTER, "--dry-run", "--exit-code", expect=4)
    done = copied.pipe("registry", "rollback", expect=2)
    assert "2 places; name one of them: --namespace production, or --namespace default" in done.stderr
    api.service = lambda path, body: answers(serving(api, copied), path)
    copied.pipe("registry", "rollback", "--namespace", "default")
    assert serving(api, copied).digest == first.bundle().digest
    stdout = copied.pipe("status").stdout
    assert "namespace production: sides serves version 1, bundle" in stdout
    assert "namespace default: sides serves version 1, bundle" in stdout
    done = copied.pipe("registry", "rollback", "--namespace", "default", expect=2)
    assert "sides has no previous version" in done.stderr
