from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from k8s.cluster.cluster import Change
from pipeline.cli import run
from pipeline.cli.app import app
from pipeline.contract.config import Config, override_config
from pipeline.contract.registry import CHAMPION, read_registry
from pipeline.contract.run import Run
from pipeline.history import Project
from pipeline.service.process import process_started, write_live
from pipeline.service.rollout import process_stamp
from pipeline.steps import deploy
from pipeline.system.errors import BundleError

from ..conftest import NewRun, bundle_of
from ..records import live_service


@pytest.mark.parametrize(("verdict", "promoted"), [("pass", True), ("no-baseline", True), ("overridden", False)])
def test_overridden_bundle_is_deployed_but_not_promoted(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch, verdict: str, promoted: bool
) -> None:
    run = new_run()
    run.partial("deploy").mkdir()
    record: dict[str, Any] = {"live": True}
    monkeypatch.setattr(Run, "bundle", lambda self, trust=None: bundle_of(self, "one", verdict))
    monkeypatch.setattr(deploy, "_locally", lambda *_: record)
    deploy.deploy(run, run.path)
    assert (CHAMPION in read_registry(run.runs, "").names) is promoted


def test_bundle_other_than_that_of_the_image_is_not_deployed(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run()
    run.output("package").mkdir()
    (run.output("package") / "image.json").write_text(json.dumps({"bundle": "a" * 64}))
    monkeypatch.setattr(Run, "bundle", lambda self, trust=None: bundle_of(self, "b" * 64))
    with pytest.raises(BundleError, match=r"its image has bundle a{12}, but the run has b{12}; restore the files"):
        deploy.deploy(run, run.path)


def test_manifests_that_were_only_rendered_promote_nothing(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run()
    run.partial("deploy").mkdir()
    monkeypatch.setattr(Run, "bundle", lambda self, trust=None: bundle_of(self, "one"))
    monkeypatch.setattr(deploy, "_locally", lambda *_: {"live": False})
    deploy.deploy(run, run.path)
    assert read_registry(run.runs, "").names == {}


def test_a_canary_is_no_champion_yet(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run()
    run.partial("deploy").mkdir()
    monkeypatch.setattr(Run, "bundle", lambda self, trust=None: bundle_of(self, "one"))
    monkeypatch.setattr(deploy, "_locally", lambda *_: {"live": True, "canary": 0.1})
    deploy.deploy(run, run.path)
    assert read_registry(run.runs, "").names == {}


@pytest.fixture
def source(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run with a bundle and nothing that forbids its deployment."""
    monkeypatch.setattr(deploy, "check_deployable", lambda source: [])
    monkeypatch.setattr(Run, "bundle", lambda self, trust=None: bundle_of(self, "b" * 64))
    return new_run()


def serve(run: Run, config: Config, bundle: str) -> None:
    """Record a live service of this bundle with the requested options."""
    place = {"host": config.deploy.host, "port": config.deploy.port, "requested_port": config.deploy.port}
    process = {"pid": os.getpid(), "process_started": process_started(os.getpid()), "stamp": process_stamp(())}
    write_live(run.runs, live_service(run=run.id, bundle=bundle, **place, **process))


def preview_text(project: Project, source: Run, *words: str) -> str:
    return deploy.lines(deploy.preview(project, source, override_config(source.config, words), print))


def test_a_preview_reports_what_a_deployment_would_change(project: Project, source: Run, config: Config) -> None:
    assert preview_text(project, source) == "service/tiny: new"
    serve(source, config, "b" * 64)
    assert preview_text(project, source) == "nothing would change"
    serve(source, config, "a" * 64)
    assert preview_text(project, source).splitlines() == [
        "service/tiny: a new process takes over: the bundle has changed",
        "service/tiny: bundle aaaaaaaaaaaa → bbbbbbbbbbbb",
    ]
    found = preview_text(project, source, "deploy.port=1234")
    assert "service/tiny: a new process takes over: the address has changed" in found


def test_preview_on_a_cluster_lists_only_changes(
    project: Project, source: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = [
        Change("service/tiny", True, ()),
        Change("hpa/tiny", False, ()),
        Change("pdb/tiny", False, ("a: 1 → 2",)),
    ]
    monkeypatch.setattr("k8s.deploy.preview", lambda *_: changes)
    monkeypatch.setattr(deploy, "image_on_cluster", lambda *_: "tiny@sha256:0")
    assert preview_text(project, source, "deploy.target=kubernetes") == "service/tiny: new\npdb/tiny: a: 1 → 2"


@pytest.mark.parametrize(("changes", "words", "status"), [(1, ["--exit-code"], 4), (0, ["--exit-code"], 0), (1, [], 0)])
def test_exit_code_option_reports_changes_of_a_preview(
    changes: int, words: list[str], status: int, folder: Path, source: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [{"object": "service/tiny", "new": True, "fields": []}] * changes
    monkeypatch.setattr(deploy, "preview", lambda *_: found)
    monkeypatch.setattr(run, "_find_deployable", lambda *_: source)
    done = CliRunner().invoke(app, ["-C", str(folder), "deploy", "--dry-run", "-o", "json", *words])
    assert done.exit_code == status
    assert json.loads(done.stdout) == found
