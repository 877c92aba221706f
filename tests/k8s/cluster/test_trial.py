"""A canary on the API server of the tests: pods that count as ours do, and a model that answers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from k8s import deploy
from k8s.cluster import canary, drift
from k8s.cluster.canary import Sample
from pipeline.contract.bundle import Bundle
from pipeline.contract.errors import StageError
from pipeline.contract.settings.cluster import Rollout

from ..api_server import Answer, ApiServer
from ..conftest import Configure

Model = Callable[[str, Any], Answer]
RULES = Rollout(requests=100, observe_seconds=1, patience=3)


def sample(requests: int, failed: int = 0, slow: int = 0) -> Sample:
    return Sample(requests, failed, {0.01: requests - slow, 0.1: requests, math.inf: requests})


@pytest.mark.parametrize(
    ("stable", "ours", "verdict", "words"),
    [
        (sample(2000), sample(2000), "go on", "failed: 0.00% against 0.00%"),
        (sample(2000), sample(2000, failed=100), "go back", "at least"),
        (sample(2000), sample(2000, slow=400), "go back", "slower than 10 ms: 20.00% against 0.00%"),
        (sample(2000), sample(50), "watch", "50 requests to the canary and 2000 to the stable"),
        (sample(120), sample(120), "watch", "is not shown yet"),
        (sample(2000, failed=400), sample(2000, failed=400), "watch", "perhaps"),
        (sample(2000, failed=400), sample(2000, failed=300), "go on", "failed: 15.00% against 20.00%"),
    ],
)
def test_a_canary_goes_on_only_where_it_is_shown_to_be_no_worse(
    stable: Sample, ours: Sample, verdict: str, words: str
) -> None:
    found = canary.judge(stable, ours, RULES)
    assert found.verdict == verdict, found
    assert words in found.text


def test_without_any_request_the_golden_ones_decide_only_where_that_is_allowed() -> None:
    assert canary.judge(Sample(), Sample(), RULES).verdict == "watch"
    assert canary.judge(Sample(), Sample(), RULES.model_copy(update={"requests": 0})).verdict == "go on"


@pytest.mark.parametrize(
    ("percent", "stable", "pods", "words"),
    [
        (10, 9, 1, "1 pod beside 9 get about 10 % of the requests"),
        (10, 2, 1, "get about 33 % of the requests (10 % was asked for, which takes 9 stable pods to one)"),
        (50, 3, 3, "3 pods beside 3 get about 50 %"),
        (10, 30, 3, "3 pods beside 30 get about 9 %"),
    ],
)
def test_the_share_is_what_replicas_can_give_and_said(percent: float, stable: int, pods: int, words: str) -> None:
    assert canary.replicas_for(percent, stable) == pods
    assert words in canary.share_told(percent, stable)


def test_shares_grow_to_half_before_all() -> None:
    assert canary.shares(10) == [10, 50]
    assert canary.shares(60) == [60]


def test_a_pod_that_started_anew_counts_from_zero() -> None:
    assert sample(50).since(sample(80)) == sample(50)
    assert sample(80, failed=3).since(sample(50, failed=1)).failed == 2


def text_of(requests: int, failed: int, seconds: float) -> str:
    """As our service writes it."""
    lines = ["# TYPE pipe_requests counter"]
    for code, count in (("200", requests - failed), ("500", failed)):
        lines.append(f'pipe_requests_total{{model="twice",digest="d",protocol="v1",code="{code}"}} {float(count)}')
    lines.append('pipe_requests_total{model="other",digest="d",protocol="v1",code="500"} 9.0')
    for bound in ("0.01", "0.1", "+Inf"):
        count = requests if seconds <= float(bound) else 0
        lines.append(
            f'pipe_request_seconds_bucket{{le="{bound}",model="twice",digest="d",protocol="v1"}} {float(count)}'
        )
    return "\n".join(lines) + "\n"


def test_what_a_pod_counts_is_read_of_its_own_model_alone() -> None:
    assert canary.read(text_of(10, 2, 0.05), "twice") == Sample(10, 2, {0.01: 0, 0.1: 10, math.inf: 10})


@pytest.fixture
def town(api: ApiServer, model: Model, configure: Configure, bundle: Bundle, tmp_path: Path) -> ApiServer:
    """Nine pods serve an earlier bundle."""
    api.unready_polls, api.nodes.replicas, api.service = 0, 9, model
    old = replace(bundle, digest="0" * 64)
    api.service = lambda path, body: (200, {"x-bundle-digest": old.digest}, model(path, body)[2])
    deploy.deploy(configure(), old, "twice:1", tmp_path / "old", False, print)
    api.service = model
    return api


def counting(model: Model, failed: float = 0.0) -> Callable[[str, str, Any], Answer]:
    """Each look at a pod's metrics finds two thousand requests more; of the canary's, so many failed."""
    looks: Counter[str] = Counter()

    def answer(pod: str, path: str, body: Any) -> Answer:
        if path != "/metrics":
            return model(path, body)
        looks[pod] += 1
        asked = 2000 * looks[pod]
        return 200, {}, text_of(asked, int(asked * failed) if "canary" in pod else 0, 0.005)

    return answer


@pytest.fixture
def walk(
    town: ApiServer, configure: Configure, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[dict[str, Any], list[str]]]:
    monkeypatch.setattr(canary.Trial, "sleep", lambda self, seconds: None)

    def run(said: list[str], **rollout: Any) -> dict[str, Any]:
        config = configure().model_copy(update={"rollout": Rollout(canary=10, observe_seconds=1, **rollout)})
        return deploy.deploy(config, bundle, "twice:2", tmp_path / "new", False, said.append)

    return run  # type: ignore[return-value] # by keyword


def serving(api: ApiServer, name: str = "twice") -> str:
    item = api.objects.get(f"/apis/apps/v1/namespaces/default/deployments/{name}")
    return item["metadata"]["annotations"]["pipe-road/bundle"] if item else ""


def test_a_good_canary_gets_all_requests_and_leaves_nothing(
    town: ApiServer, walk: Callable[..., Any], model: Model, bundle: Bundle
) -> None:
    town.pod = counting(model)
    said: list[str] = []
    record = walk(said, auto=True)
    assert (record["canary"], record["golden"]) == (None, {"requests": 2})
    assert serving(town) == bundle.digest
    assert not serving(town, "twice-canary")
    told = "\n".join(said)
    assert "canary: 1 pod beside 9 get about 10 % of the requests" in told
    assert "canary: 9 pods beside 9 get about 50 % of the requests" in told
    assert "canary at 50 %: go on" in told


def test_a_bad_canary_ends_and_the_stable_version_serves_on(
    town: ApiServer, walk: Callable[..., Any], model: Model
) -> None:
    town.pod = counting(model, failed=0.1)
    with pytest.raises(StageError, match=r"the canary has ended, .* failed: 10.00% against 0.00%"):
        walk([], auto=True)
    assert serving(town) == "0" * 64
    assert not serving(town, "twice-canary")
    assert not [path for path in town.objects if "canary" in path]


def test_a_canary_that_answers_wrongly_never_gets_to_be_measured(
    town: ApiServer, walk: Callable[..., Any], model: Model
) -> None:
    def wrong(pod: str, path: str, body: Any) -> Answer:
        status, headers, answer = model(path, body)
        return status, headers, {"predictions": [[0, 0], [0, 0]]} if "predictions" in answer else answer

    town.pod = wrong
    with pytest.raises(StageError, match="what runs is not what was judged"):
        walk([], auto=True)
    assert not serving(town, "twice-canary")


def test_a_canary_nobody_asks_is_not_promoted(town: ApiServer, walk: Callable[..., Any], model: Model) -> None:
    town.pod = lambda pod, path, body: (200, {}, text_of(0, 0, 0)) if path == "/metrics" else model(path, body)
    with pytest.raises(StageError, match="not shown within 2 s: 0 requests to the canary"):
        walk([], auto=True, patience=2)


def test_a_stumbling_proxy_and_a_pod_that_is_scaled_away_end_no_canary(
    town: ApiServer, walk: Callable[..., Any], model: Model, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("k8s.cluster.smoke._PAUSE_SECONDS", 0)
    stumbles = [503, 502]
    count = counting(model)

    def answer(pod: str, path: str, body: Any) -> Answer:
        if path == "/metrics" and pod == "twice-3":
            return 404, {}, {"message": "pods not found"}
        if path == "/metrics" and stumbles:
            return stumbles.pop(), {}, {"message": "error trying to reach service"}
        return count(pod, path, body)

    town.pod = answer
    town.fail("POST", "/pods/twice-canary", drop=True)
    assert walk([], auto=True)["canary"] is None
    assert serving(town) == bundle.digest


def test_without_auto_it_stays_beside_the_stable_version_until_somebody_decides(
    town: ApiServer, walk: Callable[..., Any], model: Model, bundle: Bundle, configure: Configure, tmp_path: Path
) -> None:
    town.pod = counting(model)
    record = walk([])
    assert record["canary"] == 10
    assert (serving(town), serving(town, "twice-canary")) == ("0" * 64, bundle.digest)
    told = drift.look("", "default", tmp_path / "old", "0" * 64)
    assert told.drift == ("deployment/twice-canary is there, and no canary is recorded",)
    assert drift.look("", "default", tmp_path / "old", "0" * 64, canary=True).drift == ()
    assert drift.found("", "default", tmp_path / "old") == drift.Found("0" * 64, canary=True)
    deploy.end_canary(configure(), print)
    assert (serving(town), serving(town, "twice-canary")) == ("0" * 64, "")
