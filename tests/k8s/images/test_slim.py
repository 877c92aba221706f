from __future__ import annotations

import importlib.util
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.system.sources import SOURCE_ROOT

SCRIPT = SOURCE_ROOT / "k8s" / "images" / "slim.py"
FILES = (
    "numpy/__init__.py",
    "numpy/tests/test_it.py",
    "numpy/lib/tests/data/deep.py",
    "numpy/testing/__init__.py",
    "numpy/f2py/__init__.py",
    "onnxruntime/transformers/models/one.py",
    "simdjson/simdjson.h",
    "tests/__init__.py",
)


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    place = tmp_path / "lib" / "python3.11" / "site-packages"
    for name in FILES:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text("x = 1\n")
    (place / "numpy" / "template.py").write_text("this is {{ no }} Python\n")
    return place


def test_unneeded_folders_are_removed_and_the_rest_compiled(packages: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    left = {path.relative_to(packages).as_posix() for path in packages.rglob("*.*") if path.suffix != ".pyc"}
    assert left == {
        "numpy/__init__.py",
        "numpy/testing/__init__.py",
        "numpy/template.py",
        "tests/__init__.py",  # a package may have this name
    }
    assert Path(importlib.util.cache_from_source(str(packages / "numpy" / "__init__.py"))).is_file()


def test_compiled_files_are_used_whatever_the_source_date(packages: Path, tmp_path: Path) -> None:
    runpy.run_path(str(SCRIPT))["main"]([str(tmp_path)])
    (packages / "numpy" / "__init__.py").write_text("x = 2\n")
    program = "import numpy; print(numpy.x)"
    env = {**os.environ, "PYTHONPATH": str(packages)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
