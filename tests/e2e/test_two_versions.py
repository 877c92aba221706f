"""Two versions of pipe use one folder and one registry: this one, and a later one whose records have more fields."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.contract.run import all_runs

from .project_folder import ProjectFolder

SOURCE = Path(__file__).resolve().parents[2]
UPGRADE = "to fix it: pip install --upgrade pipe-road"
Later = Callable[..., str]
pytestmark = pytest.mark.long


@pytest.fixture
def later(copied: ProjectFolder, tmp_path: Path) -> Later:
    """Return a function that runs a command of the later version, and returns what it prints."""
    code = tmp_path / "later"
    for name in ("pipeline", "train", "export", "serve", "k8s"):
        shutil.copytree(SOURCE / name, code / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file, record in (("run.py", "class RunFile(Frozen):"), ("registry.py", "class Change(Frozen):")):
        path = code / "pipeline/contract" / file
        text = path.read_text().replace("SCHEMA: ClassVar[int] = 3", "SCHEMA: ClassVar[int] = 4")
        path.write_text(text.replace(record, f'{record}\n    mood: str = "good"\n'))
    (metadata := code / "pipe_road-9.0.0.dist-info").mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: pipe-road\nVersion: 9.0.0\n")

    def run(*words: str) -> str:
        done = copied.pipe(*words, env={"PYTHONPATH": str(code)})
        return done.stdout + done.stderr

    return run


def test_runs_of_a_later_version_are_left_alone(copied: ProjectFolder, later: Later) -> None:
    own = {run.id for run in all_runs(copied.runs)}
    later("run", "train", "train.epochs=3")
    (other,) = (run for run in all_runs(copied.runs) if run.id not in own)
    before = (other.path / "run.json").read_bytes()
    newer = r"written by a newer version of pipe \(9\.0\.0; schema 4, this one reads 3\)"
    assert re.search(rf"{other.id}.*{newer}; {UPGRADE}", copied.pipe("status").stdout)
    copied.plan()
    copied.pipe("run", "train", "train.epochs=2")
    copied.pipe("gc", "--keep", "1")
    assert (other.path / "run.json").read_bytes() == before
    assert "written by a newer" in copied.pipe("run", "--resume", other.id, expect=2).stderr
    assert "train" in later("status")


def test_a_registry_of_a_later_version_is_read_or_refused(copied: ProjectFolder, later: Later) -> None:
    later("registry", "promote", copied.latest.id, "--reason", "later")
    registry = copied.runs / "registry"
    before = sorted((path.name, path.read_bytes()) for path in registry.rglob("*.json"))
    for words in (("registry", "history"), ("run", "all"), ("registry", "promote", copied.latest.id)):
        stderr = copied.pipe(*words, expect=2).stderr
        assert "written by a newer version of pipe (mood is unknown here)" in stderr
        assert UPGRADE in stderr
    assert sorted((path.name, path.read_bytes()) for path in registry.rglob("*.json")) == before
    assert "later" in later("registry", "history")
