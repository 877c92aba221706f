"""Deliberate breaks of promises: each is made in a copy of the source, and its test must fail there."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.system.sources import SOURCE_ROOT
from tests.breaks import k8s, runner, serve, train
from tests.breaks.breaks import Break

AREAS = {area.__name__.rpartition(".")[2]: area.BREAKS for area in (k8s, runner, serve, train)}
TIMEOUT_SECONDS = 900  # a break may make a test wait for ever
_COPIED = ("pipeline", "train", "export", "serve", "k8s", "tests", "examples", "benchmarks", "docs")
pytestmark = pytest.mark.long


@pytest.fixture(scope="session")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("source")
    for folder in _COPIED:
        shutil.copytree(SOURCE_ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in SOURCE_ROOT.iterdir():
        if file.is_file():
            shutil.copy(file, root)
    return root


def run_tests(copy: Path, *tests: str) -> tuple[int, str]:
    """Run tests of the copy, in processes that import the copy, and return pytest's exit code and output."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    output = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=copy, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            text, _ = process.communicate(timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            text, _ = process.communicate()
        return process.returncode, text


def cases() -> Iterator[Any]:
    for area, breaks in AREAS.items():
        for broken in breaks:
            yield pytest.param(broken, id=f"{area}: {broken.name}")


@pytest.mark.parametrize("area", AREAS)
def test_nothing_fails_without_a_break(area: str, copy: Path) -> None:
    code, output = run_tests(copy, *dict.fromkeys(broken.test for broken in AREAS[area]))
    assert code == 0, output


@pytest.mark.parametrize("broken", [*cases()])
def test_break_is_noticed(broken: Break, copy: Path) -> None:
    file = copy / broken.file
    source = file.read_text()
    file.write_text(broken.apply(source))
    try:
        code, output = run_tests(copy, broken.test)
    finally:
        file.write_text(source)
    assert code == 1, f"exit code {code}, which is 1 where a test failed\n{output}"


@pytest.mark.parametrize("area", AREAS)
def test_names_differ(area: str) -> None:
    names = [broken.name for broken in AREAS[area]]
    assert len(names) == len(set(names))
