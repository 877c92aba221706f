from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from k8s.cluster.drift import Found
from pipeline.cli import registry
from pipeline.cli.app import Output
from pipeline.contract.errors import ConfigError
from pipeline.history import Project
from pipeline.service.cluster_record import Placed, record

from ..conftest import NewRun


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The bundles that are deployed again, in their order."""
    found: list[str] = []
    monkeypatch.setattr(
        registry, "_put", lambda project, placed, version, context, output: found.append(version.bundle)
    )
    return found


@pytest.fixture
def back(project: Project, new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Go back after these deployments, where this bundle is what the cluster has."""

    def go(live: str, *deployed: dict[str, Any], canary: bool = False) -> Placed:
        place = {"context": "small", "server": "http://here", "namespace": "models", "image": "tiny"}
        for told in deployed:
            placed = record(new_run(), "tiny", {**place, **told})
        monkeypatch.setattr("k8s.cluster.drift.found", lambda *_: Found(live, canary))
        registry._back(project, placed, None, Output.text)
        return placed

    return go


A, B, C = ({"bundle": letter * 64} for letter in "abc")


def test_what_is_recorded_as_serving_gives_way_to_what_served_before(back: Any, put: list[str]) -> None:
    back("b" * 64, A, B)
    assert put == ["a" * 64]


def test_a_deployment_that_broke_off_is_put_back_to_what_proved_itself(back: Any, put: list[str]) -> None:
    back("c" * 64, A, B)
    assert put == ["b" * 64]


def test_a_canary_in_the_object_itself_gives_way_to_the_stable_version(back: Any, put: list[str]) -> None:
    back("c" * 64, A, B, {**C, "canary": 10.0, "canary_in_place": True})
    assert put == ["b" * 64]


def test_a_canary_that_a_killed_deployment_left_is_ended(
    back: Any, put: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended: list[str] = []
    monkeypatch.setattr(registry, "run_of", lambda runs, version: SimpleNamespace(config=None))
    monkeypatch.setattr("pipeline.contract.config.override_config", lambda config, words: words)
    monkeypatch.setattr("k8s.deploy.end_canary", lambda config, say: ended.extend(config))
    back("b" * 64, A, B, canary=True)
    assert put == []
    assert "deploy.namespace=models" in ended
    assert "the canary that was left behind has ended; bundle bbbbbbbbbbbb gets all" in capsys.readouterr().out


def test_without_anything_before_there_is_no_way_back(back: Any, put: list[str]) -> None:
    with pytest.raises(ConfigError, match="there is no way back"):
        back("a" * 64, A)
    assert put == []
