"""The sections Registry and Signatures of docs/operations.md, run line by line after a pipeline run."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeline.cli import app
from pipeline.contract.bundle import open_bundle, write_manifest
from pipeline.contract.run import Run
from pipeline.history import write_run
from pipeline.system.files import digest_mapping, digest_tree
from pipeline.system.sources import SOURCE_ROOT

from .project_folder import ProjectFolder

OPERATIONS = (SOURCE_ROOT / "docs" / "operations.md").read_text()
DOCUMENT = OPERATIONS.partition("\n## Registry\n")[2].partition("\n## Bundle contents\n")[0]


def another(run: Run) -> Run:
    """Make a later run with another bundle and a matching record."""
    later = Run(run.path.with_name("29990101-000000-ffff"))
    shutil.copytree(run.path, later.path)
    bundle = later.bundle_path
    (bundle / "card.md").write_text("# another\n")
    (bundle / "provenance.json").unlink()
    manifest = open_bundle(run.bundle_path).manifest
    write_manifest(bundle, manifest.name, manifest.verdict, manifest.ancestors)
    body, outputs = later.read(), digest_tree(later.output("export"))
    export = body.steps["export"].model_copy(update={"outputs": outputs, "digest": digest_mapping(outputs)})
    steps = {name: body.steps[name] for name in ("prepare", "train", "evaluate")} | {"export": export}
    write_run(later, body.model_copy(update={"id": later.id, "steps": steps}))
    return later


def test_documented_commands_work_in_order(copied: ProjectFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    first = copied.latest
    later = another(first)
    monkeypatch.chdir(copied.folder)
    blocks = re.findall(r"^```sh\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
    stderr = {}
    for line in "".join(blocks).splitlines():
        done = CliRunner().invoke(app, shlex.split(line.replace("RUN", later.id))[1:])
        assert (done.exit_code, done.exception) == (0, None), f"{line}\n{done.output}\n{done.exception!r}"
        stderr[line] = done.stdout
    names = {row["name"]: row["run"] for row in json.loads(stderr["pipe registry list -o json"])["names"]}
    assert names == {"champion": first.id, "staging": later.id}
    assert "slow on Mondays" not in stderr["pipe registry history"]
    assert "signed by SHA256:" in stderr["pipe verify --key team.key.pub"]
    assert "the gate's verdict is" in stderr["pipe verify --key team.key.pub --bundle runs/RUN/export/bundle"]
    assert Path("team.key").stat().st_mode & 0o777 == 0o600
