from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from k8s.cluster import Change
from pipeline import preview
from pipeline.cli import road
from pipeline.cli.app import app
from pipeline.deploy import fixed_options
from pipeline.project import Project
from pipeline.rollout import stamp_of
from pipeline.service import Live, process_started, write_live
from pipeline.spec.access import ANYBODY
from pipeline.spec.config import Config, override_config
from pipeline.spec.run import Run

from .conftest import NewRun, bundle_of


@pytest.fixture
def source(new_run: NewRun, config: Config, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run with a bundle, which would be deployed as its configuration says."""
    monkeypatch.setattr(preview, "deployable", lambda source, words: (override_config(config, words), []))
    monkeypatch.setattr(Run, "bundle", lambda self, trust=None: bundle_of(self, "b" * 64))
    return new_run()


def serve(run: Run, config: Config, bundle: str) -> None:
    """As if a service of this bundle were live here, with the very options that are asked for."""
    stamp = stamp_of(fixed_options(config, ANYBODY))
    deploy = config.deploy
    ports = {"port": deploy.port, "asked_port": deploy.port, "grpc_port": deploy.grpc_port or 1, "admin_port": 1}
    place = {"host": deploy.host, "log": "", "since": "", "token": "", "stamp": stamp, "max_body_bytes": 1, **ports}
    pid = os.getpid()
    live = Live(name="tiny", run=run.id, bundle=bundle, pid=pid, process_started=process_started(pid), **place)
    write_live(run.runs, live)


def told(project: Project, source: Run, *words: str) -> str:
    return preview.lines(preview.preview(project, source, words, print))


def test_where_nothing_serves_the_service_is_new(project: Project, source: Run) -> None:
    assert told(project, source) == "service/tiny: new"


def test_what_serves_already_changes_nothing(project: Project, source: Run, config: Config) -> None:
    serve(source, config, "b" * 64)
    assert told(project, source) == "nothing would change"


def test_another_bundle_and_another_process_are_told(project: Project, source: Run, config: Config) -> None:
    serve(source, config, "a" * 64)
    assert told(project, source) == "service/tiny: bundle aaaaaaaaaaaa → bbbbbbbbbbbb"
    found = told(project, source, "deploy.port=1234")
    assert "service/tiny: a new process takes over: another address is asked for" in found


def test_on_a_cluster_only_what_changes_is_told(project: Project, source: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = [
        Change("service/tiny", True, ()),
        Change("hpa/tiny", False, ()),
        Change("pdb/tiny", False, ("a: 1 → 2",)),
    ]
    monkeypatch.setattr("k8s.deploy.preview", lambda *_: changes)
    monkeypatch.setattr(preview, "image_on_cluster", lambda *_: "tiny@sha256:0")
    assert told(project, source, "deploy.target=kubernetes") == "service/tiny: new\npdb/tiny: a: 1 → 2"


@pytest.mark.parametrize(("changes", "words", "status"), [(1, ["--exit-code"], 4), (0, ["--exit-code"], 0), (1, [], 0)])
def test_the_exit_status_tells_a_program_whether_anything_would_change(
    changes: int, words: list[str], status: int, folder: Path, source: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [{"object": "service/tiny", "new": True, "fields": []}] * changes
    monkeypatch.setattr(preview, "preview", lambda *_: found)
    monkeypatch.setattr(road, "newest_bundle", lambda project: source)
    done = CliRunner().invoke(app, ["-C", str(folder), "deploy", "--dry-run", "-o", "json", *words])
    assert done.exit_code == status
    assert json.loads(done.stdout) == found
