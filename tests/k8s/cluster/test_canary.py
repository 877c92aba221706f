"""Services of KServe in Knative mode: proven by their newest revision, and tried at shares that Knative gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from k8s import deploy
from k8s.cluster import canary, drift
from pipeline.contract.bundle import Bundle
from pipeline.contract.config import Config
from pipeline.contract.errors import ConfigError, StageError
from pipeline.contract.settings.cluster import Rollout

from ..api_server import Answer, ApiServer
from ..conftest import Configure
from .test_trial import text_of

PLACE = "/apis/serving.kserve.io/v1beta1/namespaces/default/inferenceservices/twice"
Model = Callable[[str, Any], Answer]
KNATIVE = {"mode": "inferenceservice", "kserve_mode": "Knative"}


def answering(model: Model, failed: int = 0) -> Callable[[str, str, Any], Answer]:
    """Pods whose `/metrics` grow with each look; the second revision fails so many of two thousand requests."""
    looks: dict[str, int] = {}

    def answer(pod: str, path: str, body: Any) -> Answer:
        second = "-00002-" in pod
        if path == "/metrics":
            looks[pod] = looks.get(pod, 0) + 1
            return 200, {}, text_of(2000 * looks[pod], failed * looks[pod] if second else 0, 0.005)
        status, headers, found = model(path, body)
        return status, headers if second else {}, found

    return answer


@pytest.fixture
def town(
    api: ApiServer, model: Model, configure: Configure, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> ApiServer:
    """An earlier bundle serves."""
    monkeypatch.setattr(canary.Trial, "sleep", lambda self, seconds: None)
    api.unready_polls, api.pod = 0, answering(model)
    api.crds |= {"serving.kserve.io/v1beta1", "serving.knative.dev/v1"}
    old = replace(bundle, digest="0" * 64)
    record = deploy.deploy(configure(KNATIVE), old, "twice:1", tmp_path / "old", False, print)
    assert record["golden"] == {"requests": 2}
    return api


def with_canary(config: Config, **words: Any) -> Config:
    return config.model_copy(update={"rollout": Rollout(canary=10, observe_seconds=1, **words)})


def share(api: ApiServer) -> Any:
    return api.objects[PLACE]["spec"]["predictor"].get("canaryTrafficPercent")


def test_a_good_canary_gets_ten_percent_then_half_then_all(
    town: ApiServer, configure: Configure, bundle: Bundle, tmp_path: Path
) -> None:
    said: list[str] = []
    config = with_canary(configure(KNATIVE), auto=True)
    record = deploy.deploy(config, bundle, "twice:2", tmp_path, False, said.append)
    assert (record["canary"], record["golden"]) == (None, {"requests": 2})
    assert share(town) is None
    told = "\n".join(said)
    for words in ("gives it 10 %", "gives it 50 %", "twice-predictor-00002-private: 2 golden", "canary at 50 %: go on"):
        assert words in told
    assert town.asked_ports == {"8012"}, "Knative's proxy alone takes requests"
    assert len(town.knative.pods) == 2, "a share alone makes no revision"


def test_a_bad_canary_gets_nothing_and_the_stable_revision_everything(
    town: ApiServer, model: Model, configure: Configure, bundle: Bundle, tmp_path: Path
) -> None:
    town.pod = answering(model, failed=200)
    config = with_canary(configure(KNATIVE), auto=True)
    with pytest.raises(StageError, match=r"the canary has ended, .* failed: 10.00% against 0.00%"):
        deploy.deploy(config, bundle, "twice:2", tmp_path, False, print)
    assert share(town) == 0
    found = drift.look("", "default", tmp_path, "0" * 64)
    assert f"bundle {bundle.digest[:12]} is there for 0 % of the requests, {'0' * 12} is recorded" in found.drift
    town.pod = answering(model)  # mended, it is tried again, and not taken for what serves
    record = deploy.deploy(with_canary(config), bundle, "twice:2", tmp_path, False, print)
    assert (record["canary"], record["canary_in_place"], share(town)) == (10, True, 10)


def test_a_canary_that_answers_wrongly_is_ended(
    town: ApiServer, configure: Configure, bundle: Bundle, tmp_path: Path
) -> None:
    town.pod = lambda pod, path, body: (200, {}, {"predictions": [[0, 0], [0, 0]]})
    with pytest.raises(StageError, match="what runs is not what was judged"):
        deploy.deploy(with_canary(configure(KNATIVE)), bundle, "twice:2", tmp_path, False, print)
    assert share(town) == 0


def test_a_revision_that_is_not_ready_is_waited_for(
    town: ApiServer, configure: Configure, bundle: Bundle, tmp_path: Path
) -> None:
    predictor = {"latestCreatedRevision": "twice-predictor-00003", "latestReadyRevision": "twice-predictor-00002"}
    town.statuses["InferenceService"] = {
        "conditions": [{"type": "Ready", "status": "True"}],
        "components": {"predictor": predictor},
    }
    town.knative.see = lambda path: town.store.change(path, lambda item: item.pop("status"))  # type: ignore[method-assign, assignment]
    config = configure({**KNATIVE, "timeout_seconds": 1})
    with pytest.raises(StageError, match=r"revision twice-predictor-00003 is not ready.*`pipe rollback` puts back"):
        deploy.deploy(config, bundle, "twice:2", tmp_path, False, print)


def test_standard_mode_has_no_canary_of_its_own(
    town: ApiServer, configure: Configure, bundle: Bundle, tmp_path: Path
) -> None:
    config = with_canary(configure({"mode": "inferenceservice"}))
    with pytest.raises(ConfigError, match=r"set deploy\.kserve_mode=Knative or deploy\.mode=deployment"):
        deploy.deploy(config, bundle, "twice:2", tmp_path, False, print)
    assert town.objects[PLACE]["metadata"]["annotations"]["pipe-road/bundle"] == "0" * 64
