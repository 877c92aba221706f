"""Every step reads the files that prepare made, or says that it cannot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.spec.companions import companions_in, open_task
from pipeline.spec.errors import ConfigError, DataError
from pipeline.spec.files import write_json
from pipeline.spec.run import Run, RunFile

TASK = """
class Net:
    inputs = ("x",)
    outputs = ("y",)

    def model(self): ...
    def data(self, split): ...
    def loss(self, outputs, batch): ...
    def metrics(self, outputs, batch): ...

    def make_files(self, folder): ...

    def use_files(self, folder):
        self.words = (folder / "words.txt").read_text()
"""


@pytest.fixture
def run(root: Path) -> Run:
    """As prepare left it."""
    (root / "some_task.py").write_text(TASK)
    run = Run(root / "runs" / "one")
    files = run.output("prepare") / "files"
    files.mkdir(parents=True)
    (files / "words.txt").write_text("one two")
    write_json(run.output("prepare") / "data.json", {"files": companions_in(files)})
    config = {"name": "x", "task": "some_task.py:Net", "codec": "codec.py:C"}
    file = RunFile(id="one", created="2026-01-01", wanted=("train",), config=config, environment={})
    (run.path / "run.json").write_text(file.model_dump_json())
    return run


def test_a_later_step_opens_the_task_with_its_files(run: Run, root: Path) -> None:
    assert vars(open_task(run, root)) == {"words": "one two"}


@pytest.mark.parametrize(
    "harm",
    [
        lambda files: (files / "words.txt").write_text("one too"),
        lambda files: (files / "words.txt").unlink(),
        lambda files: (files / "words.txt").rename(files / "other.txt"),
        lambda files: (files / "more.txt").write_text("never there"),
    ],
    ids=["altered", "gone", "renamed", "added"],
)
def test_files_other_than_prepare_left_are_refused(run: Run, root: Path, harm: Callable[[Path], object]) -> None:
    harm(run.output("prepare") / "files")
    with pytest.raises(DataError, match="not as prepare left it"):
        open_task(run, root)


def test_without_a_record_of_prepare_nothing_is_believed(run: Run, root: Path) -> None:
    (run.output("prepare") / "data.json").unlink()
    with pytest.raises(DataError, match="run the prepare step first"):
        open_task(run, root)


@pytest.mark.parametrize(("left", "gone"), [("make_files", "use_files"), ("use_files", "make_files")])
def test_a_task_that_only_makes_or_only_uses_files_is_refused(run: Run, root: Path, left: str, gone: str) -> None:
    (root / "some_task.py").write_text(TASK.replace(gone, "something_else"))
    with pytest.raises(ConfigError, match=rf"{left}\(folder\) without {gone}\(folder\)"):
        open_task(run, root)
