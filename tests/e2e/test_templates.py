"""Each template of `pipe init` runs the whole pipeline as it is; those of docs/language-models.md do in its test."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from pipeline.cli.project import TEMPLATES

from .project_folder import PIPE, ProjectFolder, environment


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in TEMPLATES if name not in ("sft", "lora", "dpo")])
def test_template_is_served_and_only_an_equal_model_passes_the_gate(name: str, tmp_path: Path) -> None:
    command = [*PIPE, "init", "project", "--template", name]
    subprocess.run(command, cwd=tmp_path, env=environment({}), check=True, capture_output=True)
    project = ProjectFolder.with_free_port(tmp_path / "project")
    with project.served():  # becomes the champion
        assert len(json.loads(project.pipe("predict").stdout)["predictions"]) > 0
        for seed in (1, 2):
            project.pipe("run", "--until", "evaluate", f"train.seed={seed}")
            verdict = json.loads((project.latest.output("evaluate") / "verdict.json").read_text())
            assert (verdict["baseline"]["kind"], verdict["rule"]) == ("champion", "non-inferior")
        untrained = ("train.epochs=1", "train.lr=1e-9", "evaluate.require={}")
        rejected = project.pipe("run", "--until", "evaluate", *untrained, expect=3)
        assert "the champion's" in rejected.stderr
