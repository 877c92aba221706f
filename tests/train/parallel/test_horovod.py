"""Training with the real Horovod. It has no binary package: built once for a long test, or taken from HOROVOD_PATH."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from pipeline.contract.run import Run
from pipeline.contract.settings.stages import Train
from pipeline.system.errors import ConfigError
from pipeline.system.sources import SOURCE_ROOT
from pipeline.training.launchers import launch_command
from train.parallel.ddp import load_horovod

from ..conftest import Project, weights
from ..launching import finish, module, start

BUILD_SECONDS = 1800


@pytest.fixture(scope="session")
def horovod(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder to import it from: an installed one, or one built in a fresh environment by the script."""
    if path := os.environ.get("HOROVOD_PATH"):
        return path
    if find_spec("horovod"):
        return ""
    if missing := [tool for tool in ("cmake", "g++") if shutil.which(tool) is None]:
        pytest.skip(f"Horovod cannot be built without {missing[0]}: apt-get install cmake g++")
    folder = tmp_path_factory.mktemp("horovod")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=300)
    packages = next((folder / "lib").glob("python*/site-packages"))
    (packages / "torch.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")  # the installed torch, and no other
    done = subprocess.run(
        [str(folder / "bin" / "python"), "-m", "train.install_horovod"], cwd=SOURCE_ROOT, capture_output=True,
        text=True, timeout=BUILD_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "two processes have added a tensor; Horovod is ready" in done.stdout
    return str(packages)


def train(project: Project, run: Run, path: str, **settings: object) -> None:
    config = Train.model_validate({"strategy": "horovod", **settings})
    finish(start(project, launch_command(config, 2, module(run)), PYTHONPATH=path))


def test_missing_library_is_reported_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "horovod", None)
    with pytest.raises(ConfigError, match=r"Horovod cannot be imported .*python -m train\.install_horovod"):
        load_horovod()


@pytest.mark.long
@pytest.mark.parametrize(("compress", "tolerance"), [("none", 1e-5), ("fp16", 1e-2)])
def test_two_processes_train_the_weights_of_one(
    project: Project, horovod: str, compress: str, tolerance: float
) -> None:
    """Batches of 7 or 8 cut for two processes and three micro-batches each: nothing divides."""
    one, two = project.run("one", accumulate=3), project.run("two", accumulate=3, strategy="horovod", compress=compress)
    assert project.train(one).returncode == 0
    train(project, two, horovod, compress=compress)
    for name, tensor in weights(one).items():
        torch.testing.assert_close(weights(two)[name], tensor, rtol=tolerance, atol=tolerance)


@pytest.mark.long
def test_interrupted_run_resumes_to_the_same_weights(project: Project, horovod: str) -> None:
    whole, cut = (project.run(name, strategy="horovod", keep_checkpoints=9) for name in ("whole", "cut"))
    train(project, whole, horovod)
    checkpoints = cut.partial("train") / "checkpoints"
    checkpoints.mkdir(parents=True)
    first = "step-00000005"
    (whole.partial("train") / "checkpoints" / first).rename(checkpoints / first)
    train(project, cut, horovod)
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(weights(cut)[name], tensor, rtol=0, atol=0)
