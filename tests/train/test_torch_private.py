"""Private names of torch are in one file, and are those of every version of torch that pyproject.toml allows."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.system.sources import SOURCE_ROOT

PRIVATE = SOURCE_ROOT / "pipeline" / "system" / "torch_private.py"
PACKAGES = ("pipeline", "train", "export", "serve", "k8s")
# Private members of torch's classes, as objects have them; `_replace` and others are those of Python.
MEMBERS = {
    "_apply", "_buffers", "_dispatch_cache", "_dynamo", "_execution_engine", "_get_default_store", "_inductor",
    "_modules", "_parameters", "_schema", "_version", "_worker_info",
}  # fmt: skip
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def private_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            parts = [*str(node.module).split("."), *(alias.name for alias in node.names)]
            yield from (f"from {node.module}: {part}" for part in parts if part.startswith("_"))
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            text = ast.unparse(node)
            is_of_torch = text.startswith("torch.") and not text.startswith("torch.ops.")
            if is_of_torch or (node.attr in MEMBERS and not text.startswith(("self.", "cls."))):
                yield text


def test_private_names_of_torch_are_in_one_file() -> None:
    files = [path for package in PACKAGES for path in (SOURCE_ROOT / package).rglob("*.py") if path != PRIVATE]
    found = [
        f"{path.relative_to(SOURCE_ROOT)}: {name}"
        for path in files
        for name in private_names(ast.parse(path.read_text()))
    ]
    assert found == []
    assert len(set(private_names(ast.parse(PRIVATE.read_text())))) > 20, "the search finds them"


def test_each_private_name_has_a_reason() -> None:
    for node in ast.parse(PRIVATE.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            assert ast.get_docstring(node), node.name


def allowed_minors() -> list[str]:
    requirements = tomllib.loads((SOURCE_ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    bounds = [re.fullmatch(r"torch>=2\.(\d+),<2\.(\d+)", text) for group in requirements.values() for text in group]
    lowest, beyond = next((int(bound[1]), int(bound[2])) for bound in bounds if bound)
    return [f"2.{minor}" for minor in range(lowest, beyond)]


USE = """
import runpy, sys
import torch
import pipeline.system.torch_private
assert torch.__version__.startswith(sys.argv[1] + "."), torch.__version__
sys.argv = ["train", sys.argv[2]]
runpy.run_module("train", run_name="__main__")
"""


@pytest.mark.long
@pytest.mark.parametrize("minor", allowed_minors())
def test_training_runs_with_every_allowed_torch_version(tmp_path: Path, minor: str) -> None:
    """Train with the installed torch, or with another one in an environment on top of this one."""
    import torch

    from .conftest import TASK, Project

    python = Path(sys.executable)
    if not torch.__version__.startswith(f"{minor}."):
        python = other_torch(tmp_path / "environment", minor)
    (tmp_path / "task.py").write_text(TASK)
    run = Project(tmp_path).run(epochs=1)
    environment = os.environ | {"PYTHONPATH": f"{SOURCE_ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        [str(python), "-c", USE, minor, str(run.path)], cwd=tmp_path, env=environment, capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (run.partial("train") / "model.safetensors").is_file()


def other_torch(folder: Path, minor: str) -> Path:
    """Return the Python of an environment that has another torch, and all else from this one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=300)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    done = subprocess.run(
        [*install, "--index-url", CPU_INDEX, "--retries", "0", f"torch=={minor}.*"],
        env=os.environ | {"PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": "", "PIP_CONFIG_FILE": os.devnull},
        capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(
            f"torch {minor} without CUDA cannot be had from {CPU_INDEX}: {done.stderr.strip().splitlines()[-1]}"
        )
    packages = next((folder / "lib").glob("python*/site-packages"))
    here = Path(pytest.__file__).parents[1]
    (packages / "others.pth").write_text(f"{here}\n")  # after its own packages
    return python
