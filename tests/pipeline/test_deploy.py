from __future__ import annotations

from typing import Any

import pytest

from pipeline import deploy
from pipeline.spec.bundle import Ancestors, Bundle, Manifest
from pipeline.spec.registry import CHAMPION, PREVIOUS, read_registry
from pipeline.spec.run import Run
from pipeline.spec.signature import Limits, Runtime, Signature

from .conftest import NewRun


def bundle_of(run: Run, digest: str, verdict: str = "pass") -> Bundle:
    ancestors = Ancestors(code="a", data="b", checkpoint=f"checkpoint of {digest}", verdict="d", onnx="e")
    manifest = Manifest(schema_version=1, name="tiny", verdict=verdict, ancestors=ancestors, files={})
    limits, runtime = Limits(max_batch_size=1, max_body_bytes=1), Runtime(provider="cpu", threads=1)
    signature = Signature(inputs=(), outputs=(), codec="C", limits=limits, runtime=runtime)
    return Bundle(run.bundle_path, digest, manifest, signature)


def champion(run: Run) -> str:
    return read_registry(run.runs).names[CHAMPION].bundle


def test_what_serves_is_what_the_next_candidate_has_to_beat(new_run: NewRun) -> None:
    run = new_run()
    deploy.promote(run, bundle_of(run, "one"))
    entry = read_registry(run.runs).names[CHAMPION]
    assert (entry.bundle, entry.checkpoint, entry.path) == ("one", "checkpoint of one", f"{run.id}/export/bundle")
    assert read_registry(run.runs).history[-1].reason == f"deployed by run {run.id}"


def test_the_one_it_replaces_is_remembered(new_run: NewRun) -> None:
    run = new_run()
    for digest in ("one", "two"):
        deploy.promote(run, bundle_of(run, digest))
    assert champion(run) == "two"
    assert read_registry(run.runs).names[PREVIOUS].bundle == "one"


def test_the_same_bundle_in_a_later_run_changes_nothing(new_run: NewRun) -> None:
    first, later = new_run(), new_run()
    deploy.promote(first, bundle_of(first, "one"))
    before = read_registry(first.runs)
    deploy.promote(later, bundle_of(later, "one"))
    assert read_registry(first.runs) == before


@pytest.mark.parametrize(("verdict", "promoted"), [("pass", True), ("no-baseline", True), ("forced", False)])
def test_a_bundle_forced_past_the_gate_serves_but_is_no_champion(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch, verdict: str, promoted: bool
) -> None:
    run = new_run()
    run.partial("deploy").mkdir()
    record: dict[str, Any] = {"live": True}
    monkeypatch.setattr(Run, "bundle", lambda self: bundle_of(self, "one", verdict))
    monkeypatch.setattr(deploy, "_locally", lambda run, bundle: record)
    deploy.deploy(run, run.path)
    assert (CHAMPION in read_registry(run.runs).names) is promoted


def test_manifests_that_were_only_rendered_promote_nothing(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run()
    run.partial("deploy").mkdir()
    monkeypatch.setattr(Run, "bundle", lambda self: bundle_of(self, "one"))
    monkeypatch.setattr(deploy, "_locally", lambda run, bundle: {"live": False})
    deploy.deploy(run, run.path)
    assert read_registry(run.runs).names == {}
