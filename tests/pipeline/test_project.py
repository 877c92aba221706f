from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.project import example, find_project
from pipeline.spec.errors import ConfigError


def test_a_folder_with_settings_is_its_own_project(folder: Path) -> None:
    project = find_project(folder)
    assert (project.root, project.runs, project.embedded) == (folder, folder / "runs", False)
    assert project.config(["train.epochs=3"]).train.epochs == 3


def test_an_empty_folder_walks_the_embedded_example_and_keeps_the_runs(tmp_path: Path) -> None:
    project = find_project(tmp_path)
    assert (project.root, project.runs, project.embedded) == (example("digits"), tmp_path / "runs", True)
    assert project.config().name == "digits"


@pytest.mark.parametrize("name", ["digits", "starter"])
def test_an_example_names_files_that_are_there(name: str) -> None:
    project = find_project(example(name))
    config = project.config()
    for reference in (config.task, config.codec):
        assert (project.root / reference.partition(":")[0]).is_file()


def test_an_unknown_example_is_told() -> None:
    with pytest.raises(ConfigError, match="no example 'none'"):
        example("none")
