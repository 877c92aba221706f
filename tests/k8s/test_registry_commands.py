"""`pipe registry` and `pipe status` on a cluster, from a clone that has no run of what serves there."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from k8s import deploy
from pipeline.cli import app
from pipeline.contract.bundle import OVERRIDDEN, Bundle
from pipeline.contract.registry import Entry, ProposedChange, Registry, champion_name, change_registry, read_registry
from pipeline.contract.settings.cluster import Rollout
from pipeline.system.errors import ConfigError, PipelineError

from .api_server import ApiServer, Response
from .cluster.test_canary import counting_pods
from .conftest import Configure


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    (tmp_path / "pipe.yaml").write_text(
        "name: twice\ntask: task.py:T\ncodec: codec.py:C\ndeploy: {target: kubernetes, namespace: default}\n"
    )
    return tmp_path


@pytest.fixture
def serving(api: ApiServer, model: Callable[[str, Any], Response], bundle: Bundle) -> ApiServer:
    api.unready_polls, api.nodes.replicas, api.pod = 0, 3, counting_pods(model)
    ready: Response = (200, {"x-bundle-digest": bundle.digest}, {"ready": True})
    api.service = lambda path, body: ready if path == "/v2/health/ready" else model(path, body)
    return api


@pytest.fixture
def roll_out(serving: ApiServer, configure: Configure, bundle: Bundle, tmp_path: Path) -> Callable[..., None]:
    def run(log_requests: float, percent: float = 0, name: str = "") -> None:
        config = configure({"target": "kubernetes"}, serve={"log_requests": log_requests})
        config = config.model_copy(update={"rollout": Rollout(canary_percent=percent)})
        deploy.deploy(config, bundle, "twice:1", tmp_path / "out", False, print, run=name)

    return run


def pipe(clone: Path, *words: str) -> str:
    """Return what the command prints to standard output."""
    done = CliRunner().invoke(app, ["-C", str(clone), *words])
    if isinstance(done.exception, PipelineError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def test_versions_are_promoted_and_restored_from_another_clone(clone: Path, roll_out: Callable[..., None]) -> None:
    roll_out(0.1, name="first")
    roll_out(0.2, 25, name="second")
    status = json.loads(pipe(clone, "status", "-o", "json"))["clusters"][0]
    assert (status["current"]["run"], status["canary"]["run"], status["drift"]) == ("first", "second", [])
    with pytest.raises(ConfigError, match=r"the canary is version 2, .* of run second, so run first is not promoted"):
        pipe(clone, "registry", "promote", "first")
    assert "version 2, bundle" in pipe(clone, "registry", "promote", "second")
    with pytest.raises(ConfigError, match="twice has no canary"):
        pipe(clone, "registry", "promote")
    text = pipe(clone, "status")
    assert "twice serves version 2, bundle" in text
    assert "`pipe registry rollback` restores version 1" in text
    restored = json.loads(pipe(clone, "registry", "rollback", "-o", "json"))
    assert (restored["current"]["number"], restored["canary"]) == (1, None)
    assert json.loads(pipe(clone, "registry", "rollback", "--to", "2", "-o", "json"))["current"]["number"] == 2


def test_a_canary_is_ended_from_another_clone(clone: Path, roll_out: Callable[..., None]) -> None:
    roll_out(0.1)
    roll_out(0.2, 25)
    ended = json.loads(pipe(clone, "registry", "rollback", "-o", "json"))
    assert (ended["current"]["number"], ended["canary"]["number"]) == (1, 2)


def _propose(proposed: ProposedChange, _: Registry) -> ProposedChange:
    return proposed


def test_each_place_has_its_own_champion(
    serving: ApiServer, clone: Path, roll_out: Callable[..., None], configure: Configure, bundle: Bundle
) -> None:
    runs = clone / "runs"
    runs.mkdir()
    entry = Entry(bundle=bundle.digest, checkpoint="c", path="first/export/bundle")
    other = Entry(bundle="0" * 64, checkpoint="d", path="second/export/bundle")
    name = champion_name(configure({"target": "kubernetes"}))
    assert name == f"champion@{serving.url}/default/twice"
    for proposed in (ProposedChange(name, item, "deployed") for item in (entry, other)):
        change_registry(runs, "", partial(_propose, proposed))
    listed = json.loads(pipe(clone, "registry", "list", "-o", "json"))["names"]
    assert [(row["name"], row["bundle"]) for row in listed] == [
        (name, other.bundle), (name.replace("champion", "previous"), entry.bundle),
    ]  # fmt: skip
    roll_out(0.1)
    roll_out(0.2)
    assert f"{name} is bundle {bundle.digest[:12]}" in pipe(clone, "registry", "rollback")
    names = read_registry(runs, "").names
    assert names[name] == entry
    assert "champion" not in names


def test_the_place_is_that_of_the_settings_or_the_named_one(
    serving: ApiServer, clone: Path, roll_out: Callable[..., None]
) -> None:
    roll_out(0.1)
    assert "is gone" not in pipe(clone, "status")
    serving.namespaces.add("staging")
    with pytest.raises(ConfigError, match=r"nothing to roll back to \(recorded on the cluster: none\)"):
        pipe(clone, "registry", "rollback", "--namespace", "staging")
    with pytest.raises(ConfigError, match=r"nothing to roll back to \(recorded on the cluster: 1\)"):
        pipe(clone, "registry", "rollback")


def test_status_of_a_cluster_that_does_not_answer_is_unknown(clone: Path, no_cluster: None) -> None:
    assert "namespace default: unknown: no kubeconfig" in pipe(clone, "status")


def test_a_bundle_whose_gate_was_overridden_serves_and_is_no_champion(
    clone: Path, roll_out: Callable[..., None], bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    roll_out(0.1)
    roll_out(0.2, 25)
    overridden = replace(bundle, manifest=bundle.manifest.model_copy(update={"verdict": OVERRIDDEN}))
    monkeypatch.setattr("pipeline.service.places.find_bundle", lambda project, version: overridden)
    (clone / "runs").mkdir()
    assert "stays as it is, since the gate was overridden" in pipe(clone, "registry", "promote")
    assert read_registry(clone / "runs", "").names == {}
