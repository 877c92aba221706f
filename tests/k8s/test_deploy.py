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
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from k8s.cluster.cluster import Change, describe_changes
from k8s.deploy import deploy, preview
from pipeline.contract.bundle import Bundle
from pipeline.system.errors import ConfigError, GateError, StageError
from pipeline.system.sources import SOURCE_ROOT

from .api_server import ApiServer, Response
from .conftest import Configure

Model = Callable[[str, Any], Response]
Run = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def _ready_at_once(request: pytest.FixtureRequest) -> None:
    if "api" in request.fixturenames:
        request.getfixturevalue("api").unready_polls = 0


@pytest.fixture
def run(configure: Configure, bundle: Bundle, tmp_path: Path) -> Run:
    """Return a function that deploys the bundle, or another one, with these settings."""

    def deploy_it(
        settings: dict[str, Any] | None = None,
        *,
        image: str = "twice:1",
        bundle: Bundle = bundle,
        render: bool = False,
        report: Callable[[str], None] = print,
        **more: Any,
    ) -> dict[str, Any]:
        return deploy(configure(settings), bundle, image, tmp_path / "out", render, report, **more)

    return deploy_it


@pytest.fixture
def served(bundle: Bundle) -> Iterator[Model]:
    """Serve the model with the real service."""
    with socket.create_server(("127.0.0.1", 0)) as http, socket.create_server(("127.0.0.1", 0)) as grpc:
        ports = http.getsockname()[1], grpc.getsockname()[1]
    argv = [sys.executable, "-m", "serve", str(bundle.path), "--port", str(ports[0]), "--grpc-port", str(ports[1])]
    env = {**os.environ, "PYTHONPATH": str(SOURCE_ROOT), "PYTHONSAFEPATH": "1"}
    process = subprocess.Popen(argv, env=env)

    def ask(path: str, body: Any) -> Response:
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


def _wait_for(ask: Callable[[], Response], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        try:
            ask()
        except urllib.error.URLError:
            time.sleep(0.05)
        else:
            return
    pytest.fail(f"the service did not get ready (status {process.poll()})")


def test_the_real_service_answers_the_golden_requests(api: ApiServer, served: Model, run: Run) -> None:
    api.service = served
    reports: list[str] = []
    assert run(report=reports.append)["golden"] == {"requests": 2}
    assert not [line for line in reports if "warning" in line]


@pytest.mark.usefixtures("no_cluster")
def test_render_only_writes_manifests_without_a_cluster(tmp_path: Path, run: Run) -> None:
    record = run(render=True)
    assert record["applied"] == []
    assert record["manifests"] == sorted(path.name for path in (tmp_path / "out").iterdir())
    assert "kustomization.yaml" in record["manifests"]


def test_the_commands_to_finish_by_hand_name_the_context(tmp_path: Path, run: Run) -> None:
    reports: list[str] = []
    run({"context": "large"}, render=True, report=reports.append)
    assert f"`kubectl --context large apply --server-side -k {tmp_path}/out`" in reports[-1]


@pytest.mark.usefixtures("no_cluster")
def test_without_a_cluster_the_error_names_manifests_and_command(tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    with pytest.raises(StageError, match="no cluster to deploy to") as caught:
        run()
    assert f"kubectl apply --server-side -k {out}" in str(caught.value)
    assert (out / "kustomization.yaml").is_file()


@pytest.mark.parametrize("target", ["kubernetes", "kserve"])
def test_a_deployment_is_applied_awaited_and_checked(
    target: str, api: ApiServer, model: Model, bundle: Bundle, run: Run
) -> None:
    api.service = model
    api.crds.add("serving.kserve.io/v1beta1")
    reports: list[str] = []
    record = run({"target": target}, report=reports.append)
    assert record["golden"] == {"requests": 2}
    assert (record["context"], record["bundle"], record["image"]) == ("small", bundle.digest, "twice:1")
    assert len(record["applied"]) == len(
        [path for path in api.objects if not any(part in path for part in ("/leases/", "/replicasets/", "-version-"))]
    )
    assert reports[1] == f"deploying to context small, server {api.url}, Kubernetes v1.37.0, namespace default"
    assert reports[-1] == "2 golden requests answered as at export"


def test_a_wrong_answer_fails_the_deployment(api: ApiServer, model: Model, run: Run) -> None:
    def wrong(path: str, body: Any) -> Response:
        status, headers, answer = model(path, body)
        if "outputs" in answer:
            answer["outputs"][0]["data"][1] += 1.0
        return status, headers, answer

    api.service = wrong
    with pytest.raises(StageError, match=r"/v2/models/twice/infer: y\[1\]: expected 4.0, found 5.0"):
        run()


def test_another_bundle_behind_the_service_is_noticed(api: ApiServer, model: Model, bundle: Bundle, run: Run) -> None:
    api.service = lambda path, body: (200, {"x-bundle-digest": "0" * 64}, model(path, body)[2])
    with pytest.raises(StageError, match=f"answered by bundle {'0' * 64}, not {bundle.digest}"):
        run()


def test_a_proxy_that_drops_the_digest_header_is_reported(api: ApiServer, model: Model, run: Run) -> None:
    api.service = lambda path, body: (200, {}, model(path, body)[2])
    reports: list[str] = []
    assert run(report=reports.append)["golden"] == {"requests": 2}
    assert any("without an x-bundle-digest header" in line for line in reports)


def test_requests_are_retried_until_endpoints_exist(api: ApiServer, model: Model, run: Run) -> None:
    answers: list[Model] = [api.service, model, model]
    api.service = lambda path, body: answers.pop(0)(path, body)
    assert run()["golden"] == {"requests": 2}


@pytest.mark.parametrize(
    "late",
    [
        (200, {"x-bundle-digest": "0" * 64}, {"predictions": [[0, 0], [0, 0]]}),
        (400, {"x-bundle-digest": "0" * 64}, {"error": "another signature"}),
        (401, {}, {"error": "another key"}),
    ],
)
def test_a_late_answer_of_an_old_pod_is_waited_for(
    late: Response, api: ApiServer, model: Model, bundle: Bundle, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setattr("k8s.cluster.smoke._RETRY_PAUSE_SECONDS", 0)
    old = "0" * 64
    api.service = lambda path, body: (200, {"x-bundle-digest": old}, model(path, body)[2])
    run(bundle=replace(bundle, digest=old))
    late_answers = [late, late]
    api.service = lambda path, body: late_answers.pop() if late_answers else model(path, body)
    assert run(image="twice:2")["golden"] == {"requests": 2}
    assert not late_answers


def test_answers_of_an_old_pod_fail_the_deployment_after_a_timeout(
    api: ApiServer, model: Model, bundle: Bundle, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setattr("k8s.cluster.smoke._RETRY_TIMEOUT_SECONDS", 0)
    old = "0" * 64
    api.service = lambda path, body: (200, {"x-bundle-digest": old}, model(path, body)[2])
    run(bundle=replace(bundle, digest=old))
    with pytest.raises(StageError, match=f"answered by bundle {old}, not {bundle.digest}"):
        run(image="twice:2")


def test_an_answer_that_is_not_json_is_an_error(api: ApiServer, bundle: Bundle, run: Run) -> None:
    api.service = lambda path, body: (200, {"x-bundle-digest": bundle.digest}, "<html>")
    with pytest.raises(StageError, match="not JSON"):
        run()


def test_an_image_by_latest_is_refused_before_anything_is_written(tmp_path: Path, run: Run) -> None:
    with pytest.raises(ConfigError, match="latest"):
        run(image="twice:latest")
    assert not (tmp_path / "out").exists()


def test_a_rejected_bundle_is_neither_deployed_nor_previewed(
    api: ApiServer, model: Model, tmp_path: Path, configure: Configure, bundle: Bundle, run: Run
) -> None:
    api.service = model
    rejected = replace(bundle, manifest=bundle.manifest.model_copy(update={"verdict": "fail"}))
    with pytest.raises(GateError, match="the gate's verdict is 'fail'"):
        run(bundle=rejected)
    with pytest.raises(GateError, match="the gate's verdict is 'fail'"):
        preview(configure(), rejected, "twice:1", print)
    assert (api.objects, (tmp_path / "out").exists()) == ({}, False)


def test_a_preview_lists_each_field_and_changes_nothing(
    api: ApiServer, model: Model, configure: Configure, bundle: Bundle, run: Run
) -> None:
    reports: list[str] = []
    assert all(change.new for change in preview(configure(), bundle, "twice:1", reports.append))
    assert api.objects == {}
    assert reports == [f"comparing with context small, server {api.url}, Kubernetes v1.37.0, namespace default"]
    api.service = model
    run()
    assert describe_changes(preview(configure(), bundle, "twice:1", print)) == []
    changes = preview(configure({"cpu": "2"}), bundle, "twice:1", print)
    assert describe_changes(changes) == [
        "plan: deployment/twice: metadata.annotations.pipe-road/version: 1 → 2",
        "plan: deployment/twice: spec.template.spec.containers[server].resources.requests.cpu: 500m → 2",
    ]


@pytest.mark.parametrize("target", ["kubernetes", "kserve"])
def test_a_preview_of_other_options_shows_their_values(
    target: str, api: ApiServer, model: Model, configure: Configure, bundle: Bundle, run: Run
) -> None:
    api.service = model
    api.crds.add("serving.kserve.io/v1beta1")
    run({"target": target})
    changed = configure({"target": target, "environment": {"MORE": "1"}}, serve={"log_requests": 0.5})
    (change,) = [change for change in preview(changed, bundle, "twice:1", print) if change.name.startswith("configmap")]
    assert change.new
    assert change.fields == ("data.LOG_REQUESTS: 0 → 0.5", "data.MORE: + 1")


def test_a_failed_deployment_names_the_command_to_roll_back(
    api: ApiServer, model: Model, bundle: Bundle, run: Run
) -> None:
    api.service = model
    run()
    api.service = lambda path, body: (200, {"x-bundle-digest": bundle.digest}, {"predictions": [[0, 0], [0, 0]]})
    with pytest.raises(StageError, match="it is applied, and `pipe registry rollback` restores the version before it"):
        run({"cpu": "2"})


def test_a_change_shared_by_many_objects_is_listed_once() -> None:
    changes = [Change(f"kind/{name}", False, ("version: 1 → 2", *(["cpu: 1 → 2"] * (name == "c")))) for name in "abc"]
    assert describe_changes([*changes, Change("kind/d", True, ())]) == [
        "plan: kind/a and 2 others: version: 1 → 2", "plan: kind/c: cpu: 1 → 2", "plan: kind/d: new",
    ]  # fmt: skip
    assert describe_changes(changes[:2]) == ["plan: kind/a: version: 1 → 2", "plan: kind/b: version: 1 → 2"]
