"""Canaries against the test API server: the decision, and a second Deployment."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from k8s import deploy
from k8s.cluster import canary, drift
from k8s.cluster.cluster import Cluster
from k8s.cluster.history import Version
from pipeline.contract.bundle import Bundle
from pipeline.contract.canary import (
    LabelMetric,
    RequestCounts,
    VersionMetric,
    compare_versions,
    parse_request_counts,
    traffic_steps,
)
from pipeline.contract.config import Config
from pipeline.contract.settings.access import OPEN_ACCESS
from pipeline.contract.settings.cluster import Rollout
from pipeline.system.errors import StageError

from ..api_server import ApiServer, Response
from ..conftest import Configure

Model = Callable[[str, Any], Response]
Deploy = Callable[..., dict[str, Any]]
Measured = tuple[int, float, float]
RULES = Rollout(min_requests=100, observe_seconds=1)
OLD = "0" * 64


def counts(requests: int, failed: int = 0, slow: int = 0) -> RequestCounts:
    return RequestCounts(requests, failed, {0.01: requests - slow, 0.1: requests, math.inf: requests})


@pytest.mark.parametrize(
    ("stable", "candidate", "outcome", "text"),
    [
        (counts(2000), counts(2000), "promote", "failed: 0.00% compared with 0.00%"),
        (counts(2000), counts(2000, failed=100), "roll back", "at least"),
        (counts(2000), counts(2000, slow=400), "roll back", "slower than 10 ms: 20.00% compared with 0.00%"),
        (counts(2000), counts(50), "inconclusive", "50 requests to the canary and 2000 to the stable"),
        (counts(120), counts(120), "inconclusive", "is not shown yet"),
        (counts(2000, failed=400), counts(2000, failed=400), "inconclusive", "up to"),
        (counts(2000, failed=400), counts(2000, failed=300), "promote", "failed: 15.00% compared with 20.00%"),
    ],
)
def test_only_a_canary_shown_to_be_no_worse_is_promoted(
    stable: RequestCounts, candidate: RequestCounts, outcome: str, text: str
) -> None:
    result = compare_versions(stable, candidate, RULES)
    assert result.outcome == outcome, result
    assert text in result.text


def test_canary_without_requests_passes_only_if_none_are_required() -> None:
    no_minimum = RULES.model_copy(update={"min_requests": 0})
    assert compare_versions(RequestCounts(), RequestCounts(), RULES).outcome == "inconclusive"
    assert compare_versions(RequestCounts(), RequestCounts(), no_minimum).outcome == "promote"


def metric(stable: Measured, candidate: Measured, lower: bool = False) -> LabelMetric:
    """Return an accuracy, or with `lower` an error, from labels, low and high of two versions."""
    versions = [VersionMetric(labels, (low + high) / 2, low, high) for labels, low, high in (stable, candidate)]
    return LabelMetric("accuracy", lower, 0.01, *versions)


@pytest.mark.parametrize(
    ("labels", "needed", "outcome", "text"),
    [
        (metric((900, 0.9, 0.92), (900, 0.8, 0.85)), 0, "roll back", "at least 5.00% worse; 1.00% is allowed"),
        (metric((900, 0.9, 0.92), (3, 0.8, 0.85)), 50, "roll back", "82.50% on 3 labels compared with 91.00% on 900"),
        (metric((900, 0.1, 0.11), (900, 0.2, 0.3), lower=True), 0, "roll back", "at least 9.00% worse"),
        (metric((900, 0.2, 0.3), (900, 0.1, 0.11), lower=True), 9, "promote", "at most 0.00% worse"),
        (metric((900, 0.9, 0.92), (900, 0.915, 0.93)), 9, "promote", "at most 0.50% worse"),
        (metric((900, 0.9, 0.95), (900, 0.9, 0.95)), 0, "promote", "up to 5.00% worse; at most 1.00% is not shown"),
        (metric((900, 0.9, 0.95), (900, 0.9, 0.95)), 9, "inconclusive", "up to 5.00% worse"),
        (metric((900, 0.9, 0.92), (8, 0.915, 0.93)), 9, "inconclusive", "8 labels for the canary and 900 for the"),
        (metric((0, 0, 1), (0, 0, 1)), 0, "promote", "accuracy: 0 labels for the canary and 0 for the stable version"),
        ("serve.sample is not set", 0, "promote", "slower than 10 ms"),
        ("serve.sample is not set", 9, "inconclusive", "no labels, as serve.sample is not set; 9 of each version"),
    ],
)
def test_labels_end_a_canary_and_promote_it_where_they_are_needed(
    labels: LabelMetric | str, needed: int, outcome: str, text: str
) -> None:
    result = compare_versions(counts(2000), counts(2000), RULES.model_copy(update={"min_labels": needed}), labels)
    assert result.outcome == outcome, result
    assert text in result.text


def test_needed_labels_are_needed_without_requests_too() -> None:
    rules = RULES.model_copy(update={"min_requests": 0, "min_labels": 5})
    assert compare_versions(RequestCounts(), RequestCounts(), rules).outcome == "inconclusive"


@pytest.mark.parametrize(
    ("percent", "stable", "pods", "text"),
    [
        (10, 9, 1, "1 pod next to 9 get about 10 % of the connections"),
        (10, 2, 1, "get about 33 % of the connections (10 % needs 9 stable pods for each pod of the canary)"),
        (50, 3, 3, "3 pods next to 3 get about 50 %"),
        (10, 30, 3, "3 pods next to 30 get about 9 %"),
    ],
)
def test_percentage_that_whole_pods_give_is_reported(percent: float, stable: int, pods: int, text: str) -> None:
    assert canary.replicas_for(percent, stable) == pods
    assert text in canary.describe_traffic(percent, stable)


def test_canary_below_half_gets_half_before_all_requests() -> None:
    assert traffic_steps(10) == [10, 50]
    assert traffic_steps(60) == [60]


def test_counters_of_a_restarted_pod_begin_at_zero() -> None:
    assert counts(50).since(counts(80)) == counts(50)
    assert counts(80, failed=3).since(counts(50, failed=1)).failed == 2


def metrics_text(requests: int, failed: int, seconds: float) -> str:
    """Return `/metrics` as our service writes it."""
    lines = ["# TYPE pipe_requests counter"]
    for code, count in (("200", requests - failed), ("500", failed)):
        lines.append(f'pipe_requests_total{{model="twice",digest="d",protocol="v1",code="{code}"}} {float(count)}')
    lines.append('pipe_requests_total{model="other",digest="d",protocol="v1",code="500"} 9.0')
    for bound in ("0.01", "0.1", "+Inf"):
        count = requests if seconds <= float(bound) else 0
        labels = f'le="{bound}",model="twice",digest="d",protocol="v1"'
        lines.append(f"pipe_request_seconds_bucket{{{labels}}} {float(count)}")
    return "\n".join(lines) + "\n"


def test_requests_of_other_models_are_not_counted() -> None:
    expected = RequestCounts(10, 2, {0.01: 0, 0.1: 10, math.inf: 10})
    assert parse_request_counts(metrics_text(10, 2, 0.05), "twice") == expected


def test_server_errors_of_grpc_count_as_failed_and_errors_of_clients_do_not() -> None:
    codes = ("OK", "INVALID_ARGUMENT", "NOT_FOUND", "INTERNAL", "UNKNOWN", "UNAVAILABLE", "DEADLINE_EXCEEDED")
    lines = [f'pipe_requests_total{{model="twice",digest="d",protocol="grpc",code="{code}"}} 1.0' for code in codes]
    found = parse_request_counts("\n".join(lines), "twice")
    assert (found.requests, found.failed) == (7, 4)


def counting_pods(
    model: Model, failure_rate: float = 0.0, candidate: str = "canary"
) -> Callable[[str, str, Any], Response]:
    """Return pods that have answered 2000 more requests at each reading; some of the candidate's have failed."""
    readings: Counter[str] = Counter()

    def respond(pod: str, path: str, body: Any) -> Response:
        if path != "/metrics":
            return model(path, body)
        readings[pod] += 1
        requests = 2000 * readings[pod]
        return 200, {}, metrics_text(requests, int(requests * failure_rate) if candidate in pod else 0, 0.005)

    return respond


def wrong_answers(pod: str, path: str, body: Any) -> Response:
    return 200, {}, {"predictions": [[0, 0], [0, 0]]}


def with_canary(config: Config, **rollout: Any) -> Config:
    return config.model_copy(update={"rollout": Rollout(observe_seconds=1, **{"canary_percent": 25, **rollout})})


@pytest.fixture
def stable(
    api: ApiServer, model: Model, configure: Configure, bundle: Bundle, tmp_path: Path, no_observation: None
) -> ApiServer:
    """Let three pods serve an older bundle."""
    api.unready_polls, api.nodes.replicas = 0, 3
    api.service = lambda path, body: (200, {"x-bundle-digest": OLD}, model(path, body)[2])
    deploy.deploy(configure(), replace(bundle, digest=OLD), "twice:1", tmp_path / "old", False, print)
    api.service = model
    return api


@pytest.fixture
def deploy_canary(stable: ApiServer, configure: Configure, bundle: Bundle, tmp_path: Path) -> Deploy:
    def run(reports: list[str], labels: deploy.CompareLabels | None = None, **rollout: Any) -> dict[str, Any]:
        config = with_canary(configure(), **rollout)
        return deploy.deploy(config, bundle, "twice:2", tmp_path / "new", False, reports.append, labels=labels)

    return run


def deployed_bundle(api: ApiServer, name: str = "twice") -> str:
    item = api.objects.get(f"/apis/apps/v1/namespaces/default/deployments/{name}")
    return item["metadata"]["annotations"]["pipe-road/bundle"] if item else ""


def test_a_good_canary_gets_all_requests_and_leaves_nothing(
    stable: ApiServer, deploy_canary: Deploy, model: Model, bundle: Bundle
) -> None:
    stable.pod = counting_pods(model)
    reports: list[str] = []
    record = deploy_canary(reports, auto=True)
    assert (record["canary"], record["golden"]) == (None, {"requests": 2})
    assert deployed_bundle(stable) == bundle.digest
    assert not deployed_bundle(stable, "twice-canary")
    text = "\n".join(reports)
    assert "canary: 1 pod next to 3 get about 25 % of the connections" in text
    assert "canary: 3 pods next to 3 get about 50 % of the connections" in text
    assert "canary at 50 %: promote" in text


def test_a_bad_canary_is_rolled_back_and_the_stable_version_serves(
    stable: ApiServer, deploy_canary: Deploy, model: Model
) -> None:
    stable.pod = counting_pods(model, failure_rate=0.1)
    with pytest.raises(StageError, match=r"the canary was rolled back, .* failed: 10.00% compared with 0.00%"):
        deploy_canary([], auto=True)
    assert deployed_bundle(stable) == OLD
    assert not [path for path in stable.objects if "canary" in path]


def test_a_canary_with_worse_labels_is_rolled_back(
    stable: ApiServer, deploy_canary: Deploy, model: Model, bundle: Bundle
) -> None:
    stable.pod, began = counting_pods(model), time.time()

    def labels(stable: Version | None, candidate: Version, since: float) -> LabelMetric:
        assert stable is not None
        assert (stable.bundle, candidate.bundle) == (OLD, bundle.digest)
        assert began <= since <= time.time()
        return metric((900, 0.9, 0.92), (900, 0.8, 0.85))

    with pytest.raises(StageError, match=r"accuracy: .* at least 5.00% worse"):
        deploy_canary([], labels, auto=True)
    assert deployed_bundle(stable) == OLD


def test_a_canary_without_the_labels_it_needs_is_rolled_back(
    stable: ApiServer, deploy_canary: Deploy, model: Model
) -> None:
    stable.pod = counting_pods(model)
    with pytest.raises(StageError, match=r"inconclusive after 5 s: .* no labels, as denied; 5 of each version"):
        deploy_canary([], lambda *_: "denied", auto=True, min_labels=5)


def test_a_canary_of_the_same_bundle_needs_no_labels(
    stable: ApiServer, deploy_canary: Deploy, model: Model, configure: Configure, bundle: Bundle, tmp_path: Path
) -> None:
    stable.pod = counting_pods(model)
    deploy_canary([], auto=True)
    config = with_canary(configure(), auto=True, min_labels=5)
    assert deploy.deploy(config, bundle, "twice:3", tmp_path / "newer", False, print)["canary"] is None


def test_a_canary_that_answers_wrongly_is_ended_before_it_is_measured(stable: ApiServer, deploy_canary: Deploy) -> None:
    stable.pod = wrong_answers
    with pytest.raises(StageError, match="what runs is not what was evaluated"):
        deploy_canary([], auto=True)
    assert not deployed_bundle(stable, "twice-canary")


def test_a_canary_without_requests_is_rolled_back(stable: ApiServer, deploy_canary: Deploy, model: Model) -> None:
    idle = metrics_text(0, 0, 0)
    stable.pod = lambda pod, path, body: (200, {}, idle) if path == "/metrics" else model(path, body)
    with pytest.raises(StageError, match="inconclusive after 5 s: 0 requests to the canary"):
        deploy_canary([], auto=True)


def test_proxy_errors_and_removed_pods_do_not_end_a_canary(
    stable: ApiServer, deploy_canary: Deploy, model: Model, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("k8s.cluster.smoke._RETRY_PAUSE_SECONDS", 0)
    proxy_errors = [503, 502]
    pods = counting_pods(model)

    def respond(pod: str, path: str, body: Any) -> Response:
        if path == "/metrics" and pod == "twice-2":
            return 404, {}, {"message": "pods not found"}
        if path == "/metrics" and proxy_errors:
            return proxy_errors.pop(), {}, {"message": "error trying to reach service"}
        return pods(pod, path, body)

    stable.pod = respond
    stable.fail("POST", "/pods/twice-canary", drop=True)
    assert deploy_canary([], auto=True)["canary"] is None
    assert deployed_bundle(stable) == bundle.digest


def test_without_auto_a_canary_stays_until_a_person_ends_it(
    stable: ApiServer, deploy_canary: Deploy, model: Model, bundle: Bundle, configure: Configure, tmp_path: Path
) -> None:
    stable.pod = counting_pods(model)
    assert deploy_canary([])["canary"] == 25
    assert (deployed_bundle(stable), deployed_bundle(stable, "twice-canary")) == (OLD, bundle.digest)
    cluster = Cluster.connect("", "default")
    history = deploy.read_versions(cluster, configure())
    assert history.canary is not None
    assert history.canary.bundle == bundle.digest
    assert drift.inspect_deployment(cluster, history).drift == ()
    deploy.roll_back(configure(), OPEN_ACCESS, print, lambda version: None)
    assert (deployed_bundle(stable), deployed_bundle(stable, "twice-canary")) == (OLD, "")


@pytest.mark.parametrize(("image", "settings"), [("twice:3", {}), ("twice:2", {"cpu": 2})])
def test_another_image_or_other_options_get_a_canary_of_the_same_bundle(
    image: str,
    settings: dict[str, Any],
    stable: ApiServer,
    deploy_canary: Deploy,
    model: Model,
    configure: Configure,
    bundle: Bundle,
    tmp_path: Path,
) -> None:
    stable.pod = counting_pods(model)
    deploy_canary([], auto=True)
    reports: list[str] = []
    config = with_canary(configure(settings), auto=True)
    deploy.deploy(config, bundle, image, tmp_path / "newer", False, reports.append)
    text = "\n".join(reports)
    assert "canary: 1 pod next to 3 get" in text
    assert "twice-canary-0: 2 golden requests" in text
    assert "twice-0: 2 golden" not in text, "a stable pod of the same bundle is no canary"
    assert "canary at 50 %: promote" in text


def test_a_canary_of_the_same_bundle_is_compared_with_the_stable_pods_only(
    stable: ApiServer, deploy_canary: Deploy, model: Model, configure: Configure, bundle: Bundle, tmp_path: Path
) -> None:
    stable.pod = counting_pods(model)
    deploy_canary([], auto=True)
    stable.pod = counting_pods(model, failure_rate=0.1)
    with pytest.raises(StageError, match=r"the canary was rolled back, .* failed: 10.00% compared with 0.00%"):
        deploy.deploy(with_canary(configure(), auto=True), bundle, "twice:3", tmp_path / "newer", False, print)


def test_a_version_that_serves_already_gets_no_canary(stable: ApiServer, deploy_canary: Deploy, model: Model) -> None:
    stable.pod = counting_pods(model)
    deploy_canary([], auto=True)
    reports: list[str] = []
    deploy_canary(reports, auto=True)
    assert "rollout.canary_percent: this version serves already" in reports
    assert not any(line.startswith("canary:") for line in reports)
