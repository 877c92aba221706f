from __future__ import annotations

from typing import Any

import pytest

from pipeline import deploy
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
