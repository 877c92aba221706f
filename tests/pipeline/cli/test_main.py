from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.cli import with_defaults
from pipeline.contract.sources import HOUSE

from .conftest import Pipe


def cheapest(*command: str, times: int = 3) -> float:
    """Processor seconds of the best of several tries: what the program costs, not what else the machine does."""
    seconds = []
    for _ in range(times):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *command], cwd=HOUSE, capture_output=True, check=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if seconds[-1] < 0.3:
            break
    return min(seconds)


def test_help_comes_in_a_moment() -> None:
    """0.3 s, of which libraries take a quarter; where a busy machine stretches both, four times what they take."""
    libraries = cheapest("-c", "import typer, pydantic, yaml, psutil")
    assert cheapest("-m", "pipeline", "--help", times=5) < max(0.3, 4 * libraries)


def test_the_commands_are_listed(pipe: Pipe) -> None:
    said = pipe("--help").stdout
    for command in (
        "run",
        "plan",
        "status",
        "log",
        "diff",
        "compare",
        "report",
        "verify",
        "serve",
        "predict",
        "deploy",
    ):
        assert f" {command} " in said


def test_a_word_that_is_no_command_is_a_usage_error(pipe: Pipe) -> None:
    assert pipe("rum", expect=2).stderr == "error: No such command 'rum'. Did you mean 'run'; see `pipe --help`\n"
    said = pipe("gc", "--keep", "0", expect=2).stderr
    assert said.startswith("error: Invalid value for '--keep'") and said.count("\n") == 1


def test_the_command_alone_shows_its_help(pipe: Pipe) -> None:
    assert pipe(expect=2).stderr.startswith("Usage: pipe")


def test_commands_that_look_leave_nothing_behind(pipe: Pipe, starter: Path) -> None:
    before = sorted(starter.iterdir())
    for command in ("status", "stop", "gc", "plan"):
        pipe(command)
    assert sorted(starter.iterdir()) == before


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["run", "--resume"], ["run", "--resume", "latest"]),
        (["run", "--resume", "2026"], ["run", "--resume", "2026"]),
        (["run", "--resume", "runs/20260101-000000-aaaa"], ["run", "--resume", "runs/20260101-000000-aaaa"]),
        (["run", "--resume", "train"], ["run", "--resume", "latest", "train"]),
        (["run", "--resume", "package.base=a/b"], ["run", "--resume", "latest", "package.base=a/b"]),
        (["run", "--resume", "-o", "json"], ["run", "--resume", "latest", "-o", "json"]),
        (["run", "train", "--render"], ["run", "train", "--render", "default"]),
        (["run", "--render", "folder"], ["run", "--render", "folder"]),
        (["run", "--render", "train.image=x"], ["run", "--render", "default", "train.image=x"]),
        (["deploy", "--render", "-o", "json"], ["deploy", "--render", "default", "-o", "json"]),
    ],
)
def test_an_option_that_stands_alone_gets_its_default(typed: list[str], meant: list[str]) -> None:
    assert with_defaults(typed) == meant


def test_another_folder_can_be_worked_in(pipe: Pipe, starter: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    assert pipe("-C", str(starter), "plan", here=tmp_path / "elsewhere").stdout == pipe("plan").stdout
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_file_in_the_place_of_the_runs_is_named(pipe: Pipe, starter: Path) -> None:
    (starter / "runs").touch()
    said = pipe("run", expect=2).stderr
    assert said == f"error: {starter / 'runs'}: a file stands where the folder of runs belongs; move it away\n"
