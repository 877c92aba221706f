from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pipeline.cli import app
from pipeline.contract.bundle import open_bundle, write_manifest
from pipeline.history import create_run, find_project, find_run
from pipeline.system.errors import BundleError, PipelineError

from ..packing import record_export, write_bundle

RegistryCommand = Callable[..., Any]


@pytest.fixture
def registry(starter: Path) -> RegistryCommand:
    def run(*words: str) -> Any:
        done = CliRunner().invoke(app, ["-C", str(starter), "registry", *words, "-o", "json"])
        if isinstance(done.exception, PipelineError):
            raise done.exception
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    return run


@pytest.fixture
def runs(starter: Path) -> list[str]:
    project = find_project(starter)
    found = []
    for verdict in ("pass", "no-baseline"):  # two bundles
        run = create_run(project.runs, project.config(), ("export",), parent="")
        write_bundle(run.bundle_path, verdict)
        record_export(run)
        found.append(run.id)
    return found


def test_replaced_bundle_is_neither_promoted_nor_restored(
    registry: RegistryCommand, runs: list[str], starter: Path
) -> None:
    for name in runs:
        registry("promote", name)
    run = find_run(starter / "runs", runs[0])
    (run.bundle_path / "card.md").write_text("# exchanged\n")
    manifest = open_bundle(starter / "runs" / runs[1] / "export" / "bundle").manifest
    write_manifest(run.bundle_path, manifest.name, manifest.verdict, manifest.ancestors)
    before = registry("list")
    for command in (["promote", runs[0], "--name", "staging"], ["rollback"]):
        with pytest.raises(BundleError, match="but the one that was exported is"):
            registry(*command)
    record_export(run)
    with pytest.raises(BundleError, match="but the one that was deployed is"):
        registry("rollback")
    assert registry("list") == before


def test_promote_rollback_list_and_history(registry: RegistryCommand, runs: list[str], starter: Path) -> None:
    assert registry("list") == {"registry": str(starter / "runs" / "registry"), "names": []}
    for run in runs:
        assert registry("promote", run)["run"] == run
    registry("promote", runs[0], "--name", "staging", "--reason", "to try")
    assert {row["name"]: row["run"] for row in registry("list")["names"]} == {
        "champion": runs[1], "previous": runs[0], "staging": runs[0],
    }  # fmt: skip
    assert registry("rollback", "--reason", "it was slow")["run"] == runs[0]
    changes = registry("history", "--name", "champion")
    assert [(row["change"], row["run"], row["reason"]) for row in changes] == [
        (1, runs[0], "promoted by hand"),
        (2, runs[1], "promoted by hand"),
        (4, runs[0], "it was slow"),
    ]
    with pytest.raises(PipelineError, match="--name is empty"):
        registry("promote", runs[0], "--name", " ")
    with pytest.raises(PipelineError, match="no previous staging"):
        registry("rollback", "--name", "staging")


def test_run_without_a_bundle_cannot_be_promoted(registry: RegistryCommand, runs: list[str], starter: Path) -> None:
    shutil.rmtree(starter / "runs" / runs[0] / "export")
    with pytest.raises(PipelineError, match="has no bundle"):
        registry("promote", runs[0])
