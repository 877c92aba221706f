"""`pipe registry rollback` of a service on a cluster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from k8s.cluster.drift import LiveVersion
from pipeline.cli import registry
from pipeline.cli.app import Output
from pipeline.contract.config import override_config
from pipeline.contract.run import Run
from pipeline.history import Project
from pipeline.service.cluster_record import (
    ClusterRecord,
    Version,
    begin_deployment,
    read_cluster_records,
    record_deployment,
    write_cluster_record,
)
from pipeline.system.errors import ConfigError, Interrupted, StageError

from ..conftest import NewRun


@pytest.fixture
def deployed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The bundles that a rollback deploys again, in their order."""
    bundles: list[str] = []

    def deploy(project: Project, record: ClusterRecord, version: Version, context: str, output: Output) -> None:
        bundles.append(version.bundle)
        run = Run(project.runs / version.run)
        values = {**record.model_dump(include={"context", "server", "namespace", "target"}), **version.model_dump()}
        begin_deployment(run, override_config(run.config, [f"deploy.namespace={record.namespace}"]), record.server)
        if version.bundle in FAILING:
            raise StageError("it did not get ready")
        record_deployment(run, record.name, values)

    monkeypatch.setattr(registry, "_deploy_version", deploy)
    monkeypatch.setattr(registry, "run_of_version", lambda runs, version: Run(runs / version.run))
    return bundles


@pytest.fixture
def roll_back(project: Project, new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Roll back after these deployments, while the cluster has the bundle `live`."""

    def call(live: str, *deployments: dict[str, Any], canary: bool = False, failed: bool = False) -> None:
        place = {
            "context": "small", "server": "http://here", "namespace": "models", "target": "kubernetes", "image": "tiny",
        }  # fmt: skip
        for deployment in deployments:
            record_deployment(new_run(), "tiny", {**place, **deployment})
        (record,) = read_cluster_records(project.runs)
        if failed:
            record = write_cluster_record(project.runs, record.model_copy(update={"unfinished": "of another run"}))
        monkeypatch.setattr("k8s.cluster.drift.read_live_version", lambda *_: LiveVersion(live, canary))
        registry._roll_back_cluster(project, record, None, Output.text)

    return call


FAILING = {"f" * 64}
A, B, C, FAILS = ({"bundle": letter * 64} for letter in "abcf")


@pytest.mark.parametrize(
    ("live", "deployments", "failed", "restored"),
    [
        ("b", [A, B], False, "a"),
        ("c", [A, B], False, "b"),  # a deployment of c was interrupted
        ("b", [A, B], True, "b"),  # another deployment of b has failed
    ],
)
def test_rollback_restores_the_version_before_the_live_one(
    live: str, deployments: list[Any], failed: bool, restored: str, roll_back: Any, deployed: list[str]
) -> None:
    roll_back(live * 64, *deployments, failed=failed)
    assert deployed == [restored * 64]


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


def test_each_rollback_goes_one_version_back_until_none_is_left(roll_back: Any, deployed: list[str]) -> None:
    roll_back("c" * 64, A, B, C)
    roll_back("b" * 64)
    assert deployed == ["b" * 64, "a" * 64], "and not to the version that was rolled back"
    with pytest.raises(ConfigError, match="nothing to roll back to"):
        roll_back("a" * 64)
    assert len(deployed) == 2


def test_version_that_cannot_be_restored_is_skipped_by_the_next_rollback(roll_back: Any, deployed: list[str]) -> None:
    with pytest.raises(StageError):
        roll_back("c" * 64, A, FAILS, C)
    roll_back("f" * 64)
    assert deployed == ["f" * 64, "a" * 64]


def test_deployment_is_selected_by_context_and_namespace(
    new_run: NewRun, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    for context, namespace in (("east", "staging"), ("west", "staging"), ("west", "production")):
        place = {"context": context, "server": f"http://{context}", "namespace": namespace, "target": "kubernetes"}
        record_deployment(new_run(), "tiny", {**place, **A, "image": "tiny"})

    def choose(context: str | None, namespace: str | None) -> list[str]:
        records = registry._cluster_records(project.runs, None, context, namespace)
        return [f"{record.context} {record.namespace}" for record in records]

    def connect(context: str) -> SimpleNamespace:
        return SimpleNamespace(server={"east": "http://east", "alias": "http://east"}.get(context, "http://west"))

    monkeypatch.setattr("k8s.cluster.api.connect", connect)
    assert len(choose(None, None)) == 3
    assert choose(None, "production") == ["west production"]
    assert choose("west", "staging") == ["west staging"]
    assert choose("alias", None) == ["east staging"]
    with pytest.raises(ConfigError, match="nothing that this project deployed is recorded there"):
        choose("west", "elsewhere")
    monkeypatch.setattr(registry, "read_live", lambda runs: SimpleNamespace(alive=True))
    assert registry._cluster_records(project.runs, registry._live_service(project.runs), None, None) == []


def test_context_of_another_cluster_changes_nothing(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"context": "default", "server": "http://here", "namespace": "models", "target": "kubernetes"}
    record = record_deployment(new_run(), "tiny", {**place, **A, "image": "tiny"})
    monkeypatch.setattr("k8s.cluster.api.connect", lambda context: SimpleNamespace(server="http://there"))
    with pytest.raises(ConfigError, match="the context default is that of http://there now; name the right one"):
        registry._select_record([record], None)
    assert registry._select_record([record], "other") is record
    monkeypatch.setattr("k8s.cluster.api.connect", lambda context: SimpleNamespace(server="http://here"))
    assert registry._select_record([record], None) is record


@pytest.mark.usefixtures("deployed")
def test_interrupted_rollback_is_repeated(roll_back: Any, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = registry._deploy_version

    def interrupt(*words: Any) -> None:
        with pytest.raises(StageError):
            begin(*words)
        raise Interrupted("interrupted")

    monkeypatch.setattr(registry, "_deploy_version", interrupt)
    with pytest.raises(Interrupted):
        roll_back("c" * 64, A, FAILS, C)
    (record,) = read_cluster_records(project.runs)
    assert record.unfinished
    assert record.current.bundle == "f" * 64
