"""Training with the real Horovod. It has no binary package: built once for a long test, or taken from HOROVOD_PATH."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from pipeline.contract.errors import ConfigError
from pipeline.contract.run import Run
from pipeline.contract.settings.stages import Train
from pipeline.training.launchers import launch_command
from train.parallel.horovod import load_horovod

from ..conftest import Project, weights
from ..launching import finish, module, start

BUILD_SECONDS = 1800
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


@pytest.fixture(scope="session")
def horovod(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder to import it from."""
    if path := os.environ.get("HOROVOD_PATH"):
        return path
    if find_spec("horovod"):
        return ""
    return str(build(tmp_path_factory.mktemp("horovod")))


def build(folder: Path) -> Path:
    """Build it as in docs/training.md: torch's headers need C++20, its two CMake files set an older standard."""
    sdist = ("download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "horovod==0.28.1", "-d")
    call(*PIP, *sdist, str(folder))
    with tarfile.open(next(folder.glob("horovod-*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    source = folder / "horovod-0.28.1"
    for file in (source / "CMakeLists.txt", source / "horovod" / "torch" / "CMakeLists.txt"):
        file.write_text(file.read_text().replace("CMAKE_CXX_STANDARD 14", "CMAKE_CXX_STANDARD 20"))
    target = folder / "lib"
    enabled = {"HOROVOD_WITH_PYTORCH": "1", "HOROVOD_WITH_GLOO": "1", "HOROVOD_WITHOUT_MPI": "1"}
    disabled = {"HOROVOD_WITHOUT_TENSORFLOW": "1", "HOROVOD_WITHOUT_MXNET": "1"}
    install = ("install", "--no-build-isolation", "--no-deps", "--target", str(target), str(source))
    call(*PIP, *install, **enabled, **disabled)
    return target


def call(*argv: str, **env: str) -> None:
    done = subprocess.run(
        argv, env={**os.environ, **env}, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False
    )
    if done.returncode:
        pytest.skip(f"Horovod cannot be built here: {' '.join(argv[3:6])}: {done.stderr.strip().splitlines()[-1]}")


def train(project: Project, run: Run, path: str, **settings: object) -> None:
    config = Train.model_validate({"strategy": "horovod", **settings})
    finish(start(project, launch_command(config, 2, module(run)), PYTHONPATH=path))


def test_missing_library_is_reported_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "horovod", None)
    with pytest.raises(ConfigError, match=r"Horovod cannot be imported .*build it as docs/training\.md describes"):
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
