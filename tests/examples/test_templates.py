"""The templates of `pipe init`: complete projects, which plan and whose parts fit together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeline.cli import app
from pipeline.cli.project import TEMPLATES
from pipeline.contract.config import load_config
from pipeline.contract.run import STEPS, Run
from pipeline.history import begin_run
from pipeline.steps.check import check
from pipeline.system.sources import SOURCE_ROOT

from ..plans import fixed_memory_estimate


def test_every_template_has_a_folder() -> None:
    folders = [path.name for path in (SOURCE_ROOT / "examples" / "templates").iterdir() if path.is_dir()]
    assert sorted(folders) == sorted(TEMPLATES)


# Those of language models differ in little, and take 15 to 35 s, as speech does.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long) if name in ("dpo", "lora", "sft", "speech") else name
        for name in TEMPLATES
    ],
)
def test_template_can_be_planned_and_its_parts_fit(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "My project"
    done = CliRunner().invoke(app, ["init", str(folder), "--template", name, "-o", "json"], catch_exceptions=False)
    assert json.loads(done.stdout) == {"folder": str(folder), "name": "my-project"}
    names = {path.name for path in folder.iterdir()}
    assert names in ({"task.py", "codec.py", "pipe.yaml"}, {"task.py", "codec.py", "pipe.yaml", "make_data.py", "data"})
    with fixed_memory_estimate():
        planned = CliRunner().invoke(app, ["-C", str(folder), "plan", "-o", "json"], catch_exceptions=False)
    assert [row["action"] for row in json.loads(planned.stdout)] == ["run"] * len(STEPS)

    monkeypatch.chdir(folder)  # as the steps do, for the files in data/
    run = begin_run(Run(folder / "runs" / "one"), load_config(folder / "pipe.yaml"), ("check",))
    run.partial("check").mkdir()
    check(run, folder)
    seen = json.loads((run.partial("check") / "check.json").read_text())
    assert seen["golden_requests"] > 0
    assert seen["codec"][0].startswith("codec compared with the test data")
