from __future__ import annotations

from typing import Any

import pytest

from pipeline import deploy
from pipeline.spec.config import Config
from pipeline.spec.errors import ConfigError
from pipeline.spec.registry import CHAMPION, read_registry
from pipeline.spec.run import Run

from .conftest import NewRun, bundle_of


@pytest.mark.parametrize(("verdict", "promoted"), [("pass", True), ("no-baseline", True), ("overridden", False)])
def test_a_bundle_that_went_past_the_gate_serves_but_is_no_champion(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch, verdict: str, promoted: bool
) -> None:
    run = new_run()
    run.partial("deploy").mkdir()
    record: dict[str, Any] = {"live": True}
    monkeypatch.setattr(Run, "bundle", lambda self, trust=None: bundle_of(self, "one", verdict))
    monkeypatch.setattr(deploy, "_locally", lambda *_: record)
    deploy.deploy(run, run.path)
    assert (CHAMPION in read_registry(run.runs, "").names) is promoted


def test_manifests_that_were_only_rendered_promote_nothing(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run()
    run.partial("deploy").mkdir()
    monkeypatch.setattr(Run, "bundle", lambda self, trust=None: bundle_of(self, "one"))
    monkeypatch.setattr(deploy, "_locally", lambda *_: {"live": False})
    deploy.deploy(run, run.path)
    assert read_registry(run.runs, "").names == {}


@pytest.mark.parametrize("word", ["canary", "shadow"])
def test_what_needs_two_bundles_in_one_process_is_refused_for_a_cluster(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    words = {"deploy": {"target": "kubernetes"}, "serve": {word: "10%"}}
    config = Config.model_validate({"name": "tiny", "task": "task.py:T", "codec": "codec.py:C", **words})
    run = Run(new_run().path)
    monkeypatch.setattr(Run, "config", config)
    monkeypatch.setattr(Run, "bundle", lambda self, trust=None: bundle_of(self, "one"))
    with pytest.raises(ConfigError, match=rf"serve\.{word}: a pod on a cluster holds one bundle"):
        deploy.deploy(run, run.path)


def test_a_canary_is_no_champion_yet(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run()
    run.partial("deploy").mkdir()
    monkeypatch.setattr(Run, "bundle", lambda self, trust=None: bundle_of(self, "one"))
    monkeypatch.setattr(deploy, "_locally", lambda *_: {"live": True, "canary": 0.1})
    deploy.deploy(run, run.path)
    assert read_registry(run.runs, "").names == {}
