from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from k8s.cluster.cluster import Change, told
from k8s.deploy import deploy, preview
from pipeline.contract.bundle import Bundle
from pipeline.contract.errors import ConfigError, StageError
from pipeline.contract.sources import HOUSE

from .api_server import Answer, ApiServer
from .conftest import Configure

Model = Callable[[str, Any], Answer]


@pytest.fixture(autouse=True)
def _ready_at_once(request: pytest.FixtureRequest) -> None:
    if "api" in request.fixturenames:
        request.getfixturevalue("api").unready_polls = 0


@pytest.fixture
def served(bundle: Bundle) -> Iterator[Model]:
    """The model behind the service we really ship."""
    with socket.create_server(("127.0.0.1", 0)) as http, socket.create_server(("127.0.0.1", 0)) as grpc:
        ports = http.getsockname()[1], grpc.getsockname()[1]
    argv = [sys.executable, "-m", "serve", str(bundle.path), "--port", str(ports[0]), "--grpc-port", str(ports[1])]
    env = {**os.environ, "PYTHONPATH": str(HOUSE), "PYTHONSAFEPATH": "1"}
    process = subprocess.Popen(argv, env=env)

    def ask(path: str, body: Any) -> Answer:
        url, data = f"http://127.0.0.1:{ports[0]}{path}", None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            headers = {"x-bundle-digest": answer.headers["x-bundle-digest"]}
            return answer.status, headers, json.load(answer)

    try:
        _wait_for(lambda: ask("/v2/health/ready", None), process)
        yield ask
    finally:
        process.terminate()
        process.wait(30)


def _wait_for(ask: Callable[[], Answer], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        try:
            ask()
        except urllib.error.URLError:
            time.sleep(0.05)
        else:
            return
    pytest.fail(f"the service did not get ready (status {process.poll()})")


def test_the_service_we_ship_answers_the_golden_requests(
    api: ApiServer, served: Model, tmp_path: Path, configure: Configure, bundle: Bundle
) -> None:
    api.service = served
    said: list[str] = []
    assert deploy(configure(), bundle, "twice:1", tmp_path, False, said.append)["golden"] == {"requests": 2}
    assert not [line for line in said if "warning" in line]


@pytest.mark.usefixtures("no_cluster")
def test_render_only_writes_the_manifests_and_asks_no_cluster(
    tmp_path: Path, configure: Configure, bundle: Bundle
) -> None:
    record = deploy(configure(), bundle, "twice:1", tmp_path / "out", True, print)
    assert record["applied"] == []
    assert record["manifests"] == sorted(path.name for path in (tmp_path / "out").iterdir())
    assert "kustomization.yaml" in record["manifests"]


@pytest.mark.usefixtures("no_cluster")
def test_without_a_cluster_it_fails_and_says_what_is_rendered_and_how_to_apply_it(
    tmp_path: Path, configure: Configure, bundle: Bundle
) -> None:
    out = tmp_path / "out"
    with pytest.raises(StageError, match="no cluster to deploy to") as caught:
        deploy(configure(), bundle, "twice:1", out, False, print)
    assert f"kubectl apply --server-side -k {out}" in str(caught.value)
    assert (out / "kustomization.yaml").is_file()


@pytest.mark.parametrize("mode", ["deployment", "inferenceservice"])
def test_a_deployment_is_applied_awaited_and_proven(
    mode: str, api: ApiServer, model: Model, tmp_path: Path, configure: Configure, bundle: Bundle
) -> None:
    api.service = model
    api.crds.add("serving.kserve.io/v1beta1")
    said: list[str] = []
    record = deploy(configure({"mode": mode}), bundle, "twice:1", tmp_path / "out", False, said.append)
    assert record["golden"] == {"requests": 2}
    assert (record["context"], record["bundle"], record["image"]) == ("small", bundle.digest, "twice:1")
    assert len(record["applied"]) == len([path for path in api.objects if "/leases/" not in path])
    assert said[1] == f"deploying to context small, server {api.url}, Kubernetes v1.37.0, namespace default"
    assert said[-1] == "2 golden requests answered as at export"


def test_a_wrong_answer_fails_the_deployment(
    api: ApiServer, model: Model, tmp_path: Path, configure: Configure, bundle: Bundle
) -> None:
    def wrong(path: str, body: Any) -> Answer:
        status, headers, answer = model(path, body)
        if "outputs" in answer:
            answer["outputs"][0]["data"][1] += 1.0
        return status, headers, answer

    api.service = wrong
    with pytest.raises(StageError, match=r"/v2/models/twice/infer: y\[1\]: expected 4.0, found 5.0"):
        deploy(configure(), bundle, "twice:1", tmp_path, False, print)


def test_another_bundle_behind_the_service_is_noticed(
    api: ApiServer, model: Model, tmp_path: Path, configure: Configure, bundle: Bundle
) -> None:
    api.service = lambda path, body: (200, {"x-bundle-digest": "0" * 64}, model(path, body)[2])
    with pytest.raises(StageError, match=f"answered by bundle {'0' * 64}, not {bundle.digest}"):
        deploy(configure(), bundle, "twice:1", tmp_path, False, print)


def test_a_proxy_that_drops_the_header_is_said_aloud(
    api: ApiServer, model: Model, tmp_path: Path, configure: Configure, bundle: Bundle
) -> None:
    api.service = lambda path, body: (200, {}, model(path, body)[2])
    said: list[str] = []
    assert deploy(configure(), bundle, "twice:1", tmp_path, False, said.append)["golden"] == {"requests": 2}
    assert any("without an x-bundle-digest header" in line for line in said)


def test_endpoints_that_lag_behind_the_roll_out_are_asked_again(
    api: ApiServer, model: Model, tmp_path: Path, configure: Configure, bundle: Bundle
) -> None:
    answers: list[Model] = [api.service, model, model]
    api.service = lambda path, body: answers.pop(0)(path, body)
    assert deploy(configure(), bundle, "twice:1", tmp_path, False, print)["golden"] == {"requests": 2}


def test_an_answer_that_is_not_json_is_named(
    api: ApiServer, tmp_path: Path, configure: Configure, bundle: Bundle
) -> None:
    api.service = lambda path, body: (200, {"x-bundle-digest": bundle.digest}, "<html>")
    with pytest.raises(StageError, match="not JSON"):
        deploy(configure(), bundle, "twice:1", tmp_path, False, print)


def test_a_moving_image_is_refused_before_anything_is_written(
    tmp_path: Path, configure: Configure, bundle: Bundle
) -> None:
    with pytest.raises(ConfigError, match="latest"):
        deploy(configure(), bundle, "twice:latest", tmp_path / "out", False, print)
    assert not (tmp_path / "out").exists()


def test_a_preview_says_each_field_and_touches_nothing(
    api: ApiServer, model: Model, tmp_path: Path, configure: Configure, bundle: Bundle
) -> None:
    said: list[str] = []
    assert all(change.new for change in preview(configure(), bundle, "twice:1", said.append))
    assert api.objects == {}
    assert said == [f"looking at context small, server {api.url}, Kubernetes v1.37.0, namespace default"]
    api.service = model
    deploy(configure(), bundle, "twice:1", tmp_path, False, print)
    assert told(preview(configure(), bundle, "twice:1", print)) == []
    changes = preview(configure({"cpu": "2"}), bundle, "twice:1", print)
    assert told(changes) == [
        "plan: deployment/twice: spec.template.spec.containers[server].resources.requests.cpu: 500m → 2"
    ]


def test_a_deployment_that_breaks_off_says_what_puts_back_what_served(
    api: ApiServer, model: Model, tmp_path: Path, configure: Configure, bundle: Bundle
) -> None:
    api.service = model
    deploy(configure(), bundle, "twice:1", tmp_path, False, print)
    api.service = lambda path, body: (200, {"x-bundle-digest": bundle.digest}, {"predictions": [[0, 0], [0, 0]]})
    with pytest.raises(StageError, match="it is applied, and `pipe rollback` puts back what served before"):
        deploy(configure({"cpu": "2"}), bundle, "twice:1", tmp_path, False, print)


def test_what_changes_alike_in_many_objects_is_told_once() -> None:
    changes = [Change(f"kind/{name}", False, ("version: 1 → 2", *(["cpu: 1 → 2"] * (name == "c")))) for name in "abc"]
    assert told([*changes, Change("kind/d", True, ())]) == [
        "plan: kind/a and 2 others: version: 1 → 2", "plan: kind/c: cpu: 1 → 2", "plan: kind/d: new",
    ]  # fmt: skip
    assert told(changes[:2]) == ["plan: kind/a: version: 1 → 2", "plan: kind/b: version: 1 → 2"]
