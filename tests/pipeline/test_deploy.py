from __future__ import annotations

from typing import Any

import pytest

from pipeline import deploy
from pipeline.service import Live
from pipeline.spec.access import ANYBODY
from pipeline.spec.config import Config
from pipeline.spec.registry import CHAMPION, read_registry
from pipeline.spec.run import Run

from .conftest import NewRun, bundle_of


@pytest.mark.parametrize(("verdict", "promoted"), [("pass", True), ("no-baseline", True), ("forced", False)])
def test_a_bundle_forced_past_the_gate_serves_but_is_no_champion(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch, verdict: str, promoted: bool
) -> None:
    run = new_run()
    run.partial("deploy").mkdir()
    record: dict[str, Any] = {"live": True}
    monkeypatch.setattr(Run, "bundle", lambda self: bundle_of(self, "one", verdict))
    monkeypatch.setattr(deploy, "_locally", lambda *_: record)
    deploy.deploy(run, run.path)
    assert (CHAMPION in read_registry(run.runs).names) is promoted


def test_manifests_that_were_only_rendered_promote_nothing(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run()
    run.partial("deploy").mkdir()
    monkeypatch.setattr(Run, "bundle", lambda self: bundle_of(self, "one"))
    monkeypatch.setattr(deploy, "_locally", lambda *_: {"live": False})
    deploy.deploy(run, run.path)
    assert read_registry(run.runs).names == {}


@pytest.mark.parametrize(
    ("words", "as_asked"),
    [({}, True), ({"page": False}, False), ({"log_requests": 0.5}, False), ({"page": True}, True)],
)
def test_a_service_that_would_look_otherwise_is_started_anew(words: dict[str, Any], as_asked: bool) -> None:
    live = Live(
        name="one",
        run="run",
        bundle="digest",
        pid=1,
        process_started=0.0,
        host="127.0.0.1",
        port=8081,
        grpc_port=8082,
        asked_port=8080,
        since="now",
        log="service.log",
    )
    config = Config.model_validate({"name": "one", "task": "task.py:One", "codec": "codec.py:One", "serve": words})
    assert deploy._is_as_asked(live, config, ANYBODY) is as_asked
