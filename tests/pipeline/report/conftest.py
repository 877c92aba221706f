from __future__ import annotations

import pytest

from pipeline.contract.run import Run

from .complete_run import add_optional_files
from .example_runs import make_run
from .pages import report
from .task_kinds import KINDS, make_kind


@pytest.fixture(scope="session")
def examples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """A complete run of a classifier, and one of each other kind of task."""
    folder = tmp_path_factory.mktemp("runs")
    complete = make_run(folder / "classifier")
    add_optional_files(complete)
    return {"classifier": complete, **{name: make_kind(folder / name, name) for name in KINDS}}


@pytest.fixture(scope="session")
def pages(examples: dict[str, Run]) -> dict[str, str]:
    return {name: report(run) for name, run in examples.items()}
