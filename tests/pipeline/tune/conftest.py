"""The tiny project with something to search, and its study."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.contract.config import Config, parse_config
from pipeline.history import Project
from pipeline.tune.record import Direction, study_folder, study_name, study_parts, write_study
from pipeline.tune.search import Study, search_space

TINY = Path(__file__).resolve().parents[2] / "project"
SPACE = {"train.lr": {"low": 0.001, "high": 0.1, "log": True}, "train.batch_size": {"low": 20, "high": 40}}
MakeConfig = Callable[..., Config]


@pytest.fixture
def make_config() -> MakeConfig:
    """Return a function that makes a configuration with these settings of `tune`."""

    def make(space: dict[str, Any] | None = None, **tune: Any) -> Config:
        train = {"epochs": 2, "processes": 1, "device": "cpu"}
        values = {"name": "sides", "task": "task.py:Sides", "codec": "codec.py:SideCodec", "train": train}
        return parse_config({**values, "tune": {"space": SPACE if space is None else space, **tune}}, "test")

    return make


@pytest.fixture
def project(tmp_path: Path) -> Project:
    folder = tmp_path / "sides"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("__pycache__", ".mypy_cache"))
    return Project(folder, folder / "runs")


@pytest.fixture
def study(tmp_path: Path, make_config: MakeConfig) -> Study:
    return open_study(tmp_path / "abc", make_config(trials=3))


def begun(project: Project, config: Config) -> str:
    """Write the record of a study; return its name."""
    parts = study_parts(config, project)
    name = study_name(parts)
    study_folder(project.runs, name).mkdir(parents=True)
    write_study(study_folder(project.runs, name), config, parts)
    return name


def open_study(folder: Path, config: Config, direction: Direction = "maximize") -> Study:
    folder.mkdir(exist_ok=True)
    return Study(folder, config.tune, search_space(config), direction)
