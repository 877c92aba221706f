from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.contract.settings.stages import Train
from pipeline.executors.local import step_environment
from pipeline.system.errors import ConfigError
from pipeline.system.processes import PARENT_WATCH_VARIABLE
from pipeline.training.launchers import PASSED_ON, check_launcher, launch_command, launcher_environment

PYTHON = ("python", "-m", "train", "runs/one")


def test_mpirun_passes_the_environment_and_maps_processes_to_nodes() -> None:
    argv = launch_command(Train(launcher="mpirun"), 3, PYTHON)
    assert argv[:6] == ("mpirun", "-np", "3", "--oversubscribe", "--bind-to", "none")
    assert argv[-4:] == PYTHON
    assert argv[6:-4] == tuple(word for name in PASSED_ON for word in ("-x", name))
    assert set(PASSED_ON) == {*step_environment(1, 1), PARENT_WATCH_VARIABLE}
    argv = launch_command(Train(launcher="mpirun", nodes=2), 4, PYTHON)
    assert argv[:3] == ("mpirun", "-np", "8")
    assert "--map-by ppr:4:node" in " ".join(argv)


def test_srun_starts_equal_tasks_per_node_and_ends_them_together() -> None:
    assert launch_command(Train(launcher="srun", nodes=2), 4, PYTHON) == (
        "srun", "--nodes=2", "--ntasks=8", "--ntasks-per-node=4", "--kill-on-bad-exit=1", *PYTHON,
    )  # fmt: skip


def test_horovodrun_runs_locally_and_may_write_its_timeline() -> None:
    argv = launch_command(Train(strategy="horovod"), 2, PYTHON)
    assert argv == ("python", "-m", "horovod.runner.launch", "--gloo", "-np", "2", *PYTHON)
    traced = launch_command(Train(strategy="horovod", trace=True), 2, PYTHON)
    assert "--timeline-filename runs/one/train.partial/horovod.json python" in " ".join(traced)


def test_missing_horovod_is_reported_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.training.launchers.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"train\.strategy=horovod, but the library is not installed"):
        check_launcher(Train(strategy="horovod"))


def test_only_root_gets_the_permission_variables_of_open_mpi() -> None:
    train = Train(launcher="mpirun")
    assert set(launcher_environment(train, user=0).values()) == {"1"}
    assert launcher_environment(train, user=1000) == {}
    assert launcher_environment(Train(), user=0) == {}


@pytest.mark.parametrize("name", ["mpirun", "srun"])
def test_a_launcher_that_is_not_installed_is_reported_with_its_fix(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = Train.model_validate({"launcher": name})
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=f"train.launcher={name}, but there is no {name} on PATH; .*=torchrun"):
        check_launcher(train)
    (tmp_path / name).touch(mode=0o755)
    check_launcher(train)
    check_launcher(Train())
