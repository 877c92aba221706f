"""`pipe registry rollback` where the service is on a cluster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from k8s.cluster.drift import LiveVersion
from pipeline.cli import registry
from pipeline.cli.app import Output
from pipeline.contract.errors import ConfigError
from pipeline.history import Project
from pipeline.service.cluster_record import record_deployment

from ..conftest import NewRun


@pytest.fixture
def deployed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The bundles that a rollback deploys again, in their order."""
    bundles: list[str] = []
    monkeypatch.setattr(
        registry, "_deploy_version", lambda project, record, version, context, output: bundles.append(version.bundle)
    )
    return bundles


@pytest.fixture
def roll_back(project: Project, new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Roll back after these deployments, while the cluster has the bundle `live`."""

    def call(live: str, *deployments: dict[str, Any], canary: bool = False) -> None:
        place = {
            "context": "small", "server": "http://here", "namespace": "models", "target": "kubernetes", "image": "tiny",
        }  # fmt: skip
        for deployment in deployments:
            record = record_deployment(new_run(), "tiny", {**place, **deployment})
        monkeypatch.setattr("k8s.cluster.drift.read_live_version", lambda *_: LiveVersion(live, canary))
        registry._roll_back_cluster(project, record, None, Output.text)

    return call


A, B, C = ({"bundle": letter * 64} for letter in "abc")


def test_recorded_version_is_replaced_by_the_one_before(roll_back: Any, deployed: list[str]) -> None:
    roll_back("b" * 64, A, B)
    assert deployed == ["a" * 64]


def test_interrupted_deployment_is_replaced_by_the_recorded_version(roll_back: Any, deployed: list[str]) -> None:
    roll_back("c" * 64, A, B)
    assert deployed == ["b" * 64]


def test_canary_in_the_object_is_replaced_by_the_stable_version(roll_back: Any, deployed: list[str]) -> None:
    roll_back("c" * 64, A, B, {**C, "canary": 10.0, "canary_in_place": True})
    assert deployed == ["b" * 64]


def test_canary_left_by_a_killed_deployment_is_ended(
    roll_back: Any, deployed: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended: list[str] = []
    config = SimpleNamespace(deploy=SimpleNamespace(on_cluster=True, target="kubernetes"))
    monkeypatch.setattr(registry, "run_of_version", lambda runs, version: SimpleNamespace(config=config))
    monkeypatch.setattr(registry, "override_config", lambda config, overrides: overrides)
    monkeypatch.setattr("k8s.deploy.end_canary", lambda config, report: ended.extend(config))
    roll_back("b" * 64, A, B, canary=True)
    assert deployed == []
    assert "deploy.namespace=models" in ended
    assert "the unrecorded canary has ended; bundle bbbbbbbbbbbb gets all" in capsys.readouterr().out


def test_rollback_without_a_previous_version_is_an_error(roll_back: Any, deployed: list[str]) -> None:
    with pytest.raises(ConfigError, match="nothing to roll back to"):
        roll_back("a" * 64, A)
    assert deployed == []
