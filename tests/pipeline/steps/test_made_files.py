"""Files of make_files(): made once in a run, by check, and taken by prepare."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.contract.run import CHECKED_FILES, Run
from pipeline.steps.check import check
from pipeline.steps.prepare import prepare
from pipeline.system.errors import DataError
from pipeline.user.readers import READ_FILES, changed_read_files

from ..records import write_run_file
from .test_check import CODEC, TASK

FILES = """
    def make_files(self, folder):
        with open("made", "a") as made:
            made.write(folder.parent.name + "\\n")
        (folder / "scale").write_text(str(len(list(read_jsonl("rows.jsonl")))))

    def use_files(self, folder):
        self.scale = float((folder / "scale").read_text())
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    task = TASK.replace("import numpy", "from pipeline import read_jsonl\nimport numpy").replace(
        "astype(np.float32)", "astype(np.float32) * self.scale"
    )
    (tmp_path / "task.py").write_text(task + FILES)
    (tmp_path / "codec.py").write_text(CODEC)
    (tmp_path / "rows.jsonl").write_text("{}\n{}\n")
    return tmp_path


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Forget what was read, as a new process of a step has read nothing."""

    def forget() -> None:
        monkeypatch.setattr("pipeline.user.readers._patterns", {})

    forget()
    return forget


def new_run(root: Path, name: str = "run", wanted: str = "prepare", **sections: Any) -> Run:
    run = Run(root / "runs" / name)
    for step in ("check", "prepare"):
        run.partial(step).mkdir(parents=True)
    sections |= {"task": "task.py:Task", "codec": "codec.py:Codec", "evaluate": {"metric": "accuracy"}}
    return write_run_file(run, wanted, **sections)


def made(root: Path) -> list[str]:
    return (root / "made").read_text().split()


def digests(run: Run) -> dict[str, str]:
    found: dict[str, str] = json.loads((run.partial("prepare") / "data.json").read_text())["files"]
    return found


def test_files_are_made_once_in_a_run_and_recorded_as_ever(root: Path, process: Callable[[], None]) -> None:
    run, other = new_run(root), new_run(root, "other")
    prepare(other, root)
    assert made(root) == ["prepare.partial"], "without a check, prepare makes them"
    check(run, root)
    process()
    prepare(run, root)
    assert made(root) == ["prepare.partial", CHECKED_FILES]
    assert digests(run) == digests(other) != {}
    assert not (run.path / CHECKED_FILES / "files").exists(), "they are moved, not copied"
    assert (run.partial("prepare") / "files" / "scale").read_text() == "2"
    assert changed_read_files(root, run.partial("prepare")) == []
    (root / "rows.jsonl").write_text("{}\n")
    assert changed_read_files(root, run.partial("prepare")) == ["rows.jsonl"], "a file that only make_files() read"


def test_prepare_makes_files_again_where_what_they_were_made_of_changed(
    root: Path, process: Callable[[], None]
) -> None:
    run = new_run(root)
    check(run, root)
    process()
    (root / "rows.jsonl").write_text("{}\n{}\n{}\n")
    prepare(run, root)
    assert made(root) == [CHECKED_FILES, "prepare.partial"]
    assert (run.partial("prepare") / "files" / "scale").read_text() == "3"
    assert "rows.jsonl" in (run.partial("prepare") / READ_FILES).read_text()


def test_another_attempt_of_prepare_makes_the_files_itself(root: Path) -> None:
    body = (root / "task.py").read_text()
    (root / "task.py").write_text(body.replace('"validation": 1', '"validation": 0'))
    run = new_run(root, prepare={"copies": "error"})
    check(run, root)
    with pytest.raises(DataError, match="more than one split"):
        prepare(run, root)
    with pytest.raises(DataError, match="more than one split"):
        prepare(run, root)
    assert made(root) == [CHECKED_FILES, "prepare.partial"]


def test_a_check_without_prepare_keeps_no_files(root: Path) -> None:
    run = new_run(root, wanted="check")
    check(run, root)
    assert made(root) == [CHECKED_FILES]
    assert not (run.path / CHECKED_FILES).exists()
