"""The processes of trackers: a missing client, or a server that hangs or is unreachable, does not affect the run."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from importlib.machinery import ModuleSpec

import pytest

from pipeline.contract.config import Config, override_config
from pipeline.contract.run import Run
from pipeline.history import Project, create_run
from pipeline.plan import STEP_KINDS, config_parts
from pipeline.system.errors import ConfigError, ResourceError
from pipeline.tracking import process
from pipeline.tracking.__main__ import TRACKERS, main
from pipeline.tracking.process import Tracking, check_trackers


@pytest.fixture
def run(project: Project, config: Config) -> Run:
    return create_run(project.runs, override_config(config, ["track=[mlflow]"]), ("prepare", "train"), parent="")


@pytest.fixture
def silent_server() -> Iterator[str]:
    """The address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("spec", [None, ModuleSpec("wandb", None)], ids=["absent", "a folder without code"])
def test_missing_client_is_named_with_its_install_command(
    spec: ModuleSpec | None, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "find_spec", lambda _: spec)
    check_trackers(config)
    with pytest.raises(ConfigError, match=r"pip install 'pipe-road\[wandb\]'"):
        check_trackers(override_config(config, ["track=[tensorboard, wandb]"]))


def test_trackers_are_in_no_key_and_start_only_for_training(config: Config, run: Run, project: Project) -> None:
    other = override_config(config, ["track=[mlflow, mlflow]"])
    assert other.external_trackers == ("mlflow",)
    assert all(config_parts(kind, other) == config_parts(kind, config) for kind in STEP_KINDS.values())
    tracking = Tracking(project.root, run, print)
    for step in ("prepare", "package", "deploy"):
        tracking.begin(step)
    tracking.end(0)
    assert not run.log("mlflow").exists()


def test_unreachable_tracker_is_reported(run: Run, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    reports: list[str] = []
    tracking = Tracking(project.root, run, reports.append)
    tracking.begin("train")
    tracking.end(300)
    warnings = [line for line in reports if line.startswith("warning: mlflow: ")]
    assert warnings[0].startswith("warning: mlflow: MlflowException: ")
    assert (
        f"does not have all of this run; `python -m pipeline.tracking mlflow {run.path}` sends the rest" in warnings[-1]
    )


@pytest.mark.usefixtures("without_locks")
def test_only_mlflows_own_database_needs_locks(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    with pytest.raises(ResourceError, match="no locks, which the database needs; to fix it: set MLFLOW_TRACKING_URI"):
        TRACKERS["mlflow"](run).open("")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(Exception, match="Connection refused"):  # the request was sent
        TRACKERS["mlflow"](run).open("")


def test_damaged_record_of_what_was_sent_is_named(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.nice", lambda _: 0)
    monkeypatch.setitem(TRACKERS, "mlflow", lambda _: None)
    process.state_file(run, "mlflow").parent.mkdir()
    process.state_file(run, "mlflow").write_bytes(bytes(9))
    assert main(["mlflow", str(run.path)]) == 1
    assert "warning: mlflow: " in (line := capsys.readouterr().out)
    assert "mlflow.json: damaged: it is empty; to fix it: delete it" in line


def test_hanging_tracker_is_not_awaited(
    run: Run, project: Project, silent_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", silent_server)
    reports: list[str] = []
    tracking = Tracking(project.root, run, reports.append)
    tracking.begin("train")
    tracking.end(0)
    assert "warning: mlflow: did not receive everything in time" in reports[-1]
    assert "Traceback" not in run.log("mlflow").read_text()
