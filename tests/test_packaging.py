"""The wheel: what it installs, and that it works in an environment that has never seen the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"pipeline", "train", "export", "serve", "k8s"}
CONSTRAINTS = ROOT / "constraints.txt"


def run(*argv: str | Path, cwd: Path, timeout: float = 600, ok: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command that must not see the checkout: neither as its folder nor on PYTHONPATH."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(word) for word in argv], cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert not ok or done.returncode == 0, f"{argv}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder, cwd=ROOT)
    return next(folder.glob("*.whl"))


def environment(folder: Path, *requirements: str | Path) -> Path:
    """Make a virtual environment with these requirements and return its folder of commands."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "--disable-pip-version-check")
    run(
        *pip,
        "install",
        "--quiet",
        "--no-compile",
        "--constraint",
        CONSTRAINTS,
        *requirements,
        cwd=folder.parent,
        timeout=1800,
    )
    return folder / "bin"


@pytest.fixture(scope="module")
def base(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("base") / "venv", wheel)


def test_wheel_installs_five_packages_and_their_data(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.partition("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == PACKAGES
    for needed in (
        "pipeline/py.typed",
        "pipeline/examples/digits/pipe.yaml",
        "pipeline/examples/given/embeddings/task.py",
        "pipeline/examples/starter/task.py",
        "pipeline/examples/templates/image-to-image/task.py",
        "pipeline/examples/deepseek/pretrain/pipe.yaml",
        "pipeline/report/style.css",
        "serve/page/page.js",
        "k8s/images/serve.Dockerfile",
        "k8s/manifests/serve/base/deployment.yaml",
        "k8s/manifests/train/base/job.yaml",
    ):
        assert needed in names
    tracked = run("git", "ls-files", *sorted(PACKAGES), cwd=ROOT).stdout.split() if (ROOT / ".git").exists() else []
    assert sorted(set(tracked) - set(names)) == []


@pytest.mark.long
def test_base_install_has_a_working_command_line(base: Path, tmp_path: Path) -> None:
    version = run(base / "pipe", "--version", cwd=tmp_path).stdout
    assert version.split()[-1] == "0.1.0"
    assert "Usage: pipe" in run(base / "pipe", "-h", cwd=tmp_path).stdout
    run(base / "pipe", "init", "mine", cwd=tmp_path)
    assert (tmp_path / "mine" / "task.py").is_file()


def test_missing_extra_is_named_with_its_install_command(base: Path, tmp_path: Path) -> None:
    run(base / "pipe", "init", "mine", cwd=tmp_path)
    done = run(base / "pipe", "-C", "mine", "run", "all", cwd=tmp_path, ok=False)
    assert done.returncode in (1, 2)
    output = done.stdout + done.stderr
    assert "pip install 'pipe-road[train]'" in output
    assert "Traceback" not in output


@pytest.mark.long
def test_installed_pipeline_runs_beside_evaluate_and_datasets(wheel: Path, tmp_path: Path) -> None:
    commands = environment(tmp_path / "venv", f"{wheel}[train,examples]", "evaluate", "datasets")
    project = tmp_path / "project"
    project.mkdir()
    run(commands / "pipe", "demo", ".", f"deploy.port={free_port()}", "train.epochs=10", cwd=project, timeout=1200)
    try:
        status = json.loads(run(commands / "pipe", "status", "-o", "json", cwd=project).stdout)
        assert status
        assert run(commands / "pipe", "predict", cwd=project).stdout
        whose = "import evaluate, datasets; print(evaluate.__file__, hasattr(evaluate, 'load'))"
        assert run(commands / "python", "-c", whose, cwd=project).stdout.split()[-1] == "True"
    finally:
        run(commands / "pipe", "stop", cwd=project)
