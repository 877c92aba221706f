"""`from pipeline import …` in a project's task.py and codec.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import pipeline

ROOT = Path(pipeline.__file__).parent


def imported_modules(statement: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}\nimport sys; print(*sys.modules)"],
        capture_output=True, text=True, check=True, cwd=ROOT.parent,
    )  # fmt: skip
    return set(done.stdout.split())


def test_importing_pipeline_loads_neither_torch_nor_numpy() -> None:
    assert imported_modules("import pipeline") & {"torch", "numpy", "pydantic"} == set()


def test_a_codec_imports_its_names_without_torch() -> None:
    assert "torch" not in imported_modules("from pipeline import Drawing, InvalidPayload")


@pytest.mark.parametrize("name", pipeline.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(pipeline, name) is not None
    assert name in dir(pipeline)


def test_an_unknown_name_is_an_import_error() -> None:
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec("from pipeline import nothing")
