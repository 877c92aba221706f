from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from pipeline.contract.config import parse_config
from pipeline.executors.local import (
    LocalLauncher,
    count_gpus,
    fork_server,
    pod_environment,
    prepare_log,
    read_log_end,
    step_environment,
    with_this_python,
)
from pipeline.system.errors import ResourceError
from pipeline.system.sources import SOURCE_ROOT

# A step that prints its pid and then waits until its parent ends.
WAITING = (
    "import os, time; from pipeline.system.processes import watch_parent; watch_parent(); "
    "print(os.getpid(), flush=True); time.sleep(60)"
)
RUNNER = """
import sys
from pathlib import Path
from pipeline.executors.local import LocalLauncher
log, program = Path(sys.argv[1]), sys.argv[2]
sys.exit(LocalLauncher(Path.cwd(), log.with_suffix(".tick").touch).launch(("python", "-c", program), log, {}))
"""


def launch(program: str, log: Path, **env: str) -> int:
    return LocalLauncher(log.parent, lambda: None).launch(("python", "-c", program), log, env)


def waited_for(log: Path) -> int:
    """Return the pid that a step wrote, once its runner waits for it, which may take longer on a busy machine."""
    pid, deadline = pid_in(log), time.monotonic() + 300
    while not log.with_suffix(".tick").exists():
        assert time.monotonic() < deadline, "the runner does not tick"
        time.sleep(0.01)
    return pid


def pid_in(log: Path) -> int:
    """Return the pid that a waiting step wrote."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if log.exists() and log.read_text().endswith("\n"):
            return int(log.read_text())
        time.sleep(0.01)
    raise AssertionError("the step did not start")


def gone(pid: int) -> bool:
    try:
        process = psutil.Process(pid)
        process.wait(timeout=300)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return False
    return True


@pytest.mark.parametrize(
    ("program", "status"),
    [("raise SystemExit(3)", 3), ("pass", 0), ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL)],
)
def test_exit_status_or_signal_of_a_step_is_returned(program: str, status: int, tmp_path: Path) -> None:
    assert launch(program, tmp_path / "log") == status


def test_step_runs_in_the_project_and_appends_both_streams_to_the_log(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("earlier\n")
    program = "import os, sys; print(os.getcwd(), os.environ['WORD'], os.environ['PIPE_PARENT_WATCH'], flush=True); "
    launch(f"{program}print('err', file=sys.stderr)", tmp_path / "log", WORD="w")
    assert (tmp_path / "log").read_text().splitlines() == ["earlier", f"{tmp_path} w 1", "err"]


def test_project_module_does_not_shadow_an_installed_one(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('the module of the project')")
    launcher = LocalLauncher(tmp_path, lambda: None)
    argv = ("python", "-m", "json.tool", "--help")
    assert launcher.launch(argv, tmp_path / "log", step_environment(1, 1)) == 0, (tmp_path / "log").read_text()


def test_callback_is_called_while_a_step_runs(tmp_path: Path) -> None:
    """The step ends only after a call."""
    came = tmp_path / "came"
    program = f"import pathlib, time\nwhile not pathlib.Path({str(came)!r}).exists(): time.sleep(0.01)"
    assert LocalLauncher(tmp_path, came.touch).launch(("python", "-c", program), tmp_path / "log", {}) == 0


def test_an_interrupt_ends_the_step_first(tmp_path: Path) -> None:
    log = tmp_path / "log"
    runner = subprocess.Popen(
        [sys.executable, "-c", RUNNER, str(log), WAITING], cwd=SOURCE_ROOT, stderr=subprocess.PIPE
    )
    pid = waited_for(log)
    runner.send_signal(signal.SIGINT)
    _, output = runner.communicate(timeout=300)
    assert b"KeyboardInterrupt" in output
    assert not psutil.pid_exists(pid), "the runner waits for its end"


def test_a_step_that_ignores_the_request_to_end_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    deaf = "import os, signal, time; signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True); time.sleep(60)"

    def interrupt() -> None:
        if log.read_text().endswith("\n"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        LocalLauncher(tmp_path, interrupt, grace_seconds=0.2).launch(("python", "-c", deaf), log, {})
    assert not psutil.pid_exists(pid_in(log))


def test_second_interrupt_does_not_wait_for_the_step(tmp_path: Path) -> None:
    log = tmp_path / "log"
    deaf = "import os, signal, time; signal.signal(15, lambda *_: print('SIGTERM', flush=True)); " + WAITING
    runner = subprocess.Popen([sys.executable, "-c", RUNNER, str(log), deaf], cwd=SOURCE_ROOT, stderr=subprocess.PIPE)
    pid = pid_in(log)
    runner.send_signal(signal.SIGINT)
    while "SIGTERM" not in log.read_text():
        assert runner.poll() is None
        time.sleep(0.02)
    runner.send_signal(signal.SIGINT)
    _, output = runner.communicate(timeout=300)
    assert b"KeyboardInterrupt" in output
    assert gone(pid)


def test_step_ends_with_a_killed_runner(tmp_path: Path) -> None:
    log = tmp_path / "log"
    runner = subprocess.Popen([sys.executable, "-c", RUNNER, str(log), WAITING], cwd=SOURCE_ROOT)
    pid = pid_in(log)
    runner.kill()
    runner.wait(timeout=300)
    assert gone(pid)


def test_cores_are_divided_among_processes_unless_threads_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert step_environment(processes=2, cores=8)["OMP_NUM_THREADS"] == "4"
    assert step_environment(processes=4, cores=2)["OMP_NUM_THREADS"] == "1"
    assert step_environment(processes=1, cores=2)["PYTHONSAFEPATH"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert step_environment(processes=2, cores=8)["OMP_NUM_THREADS"] == "3"
    assert step_environment(processes=2, cores=8, threads=5)["OMP_NUM_THREADS"] == "5"
    assert "OMP_NUM_THREADS" not in pod_environment()


def test_progress_bars_stay_out_of_logs_unless_the_user_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    program = "from tqdm.auto import tqdm; print(sum(tqdm([1, 2])))"

    def run() -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **step_environment(1, 1)}
        return subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300, check=True
        )

    assert (run().stdout, run().stderr) == ("3\n", "")
    monkeypatch.setenv("TQDM_DISABLE", "")
    assert "100%" in run().stderr


@pytest.mark.parametrize(("visible", "count"), [("0,1", 2), ("", 0), ("-1", 0), ("GPU-5a3f", 1)])
@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"])
def test_visible_devices_are_counted_as_cuda_does(name: str, visible: str, count: int, tmp_path: Path) -> None:
    write_files(tmp_path, "dev/nvidia0")
    assert count_gpus({name: visible}, tmp_path) == count


def write_files(system: Path, *names: str) -> None:
    for name in names:
        (system / name).parent.mkdir(parents=True, exist_ok=True)
        (system / name).touch()


def test_all_gpus_count_by_default(tmp_path: Path) -> None:
    assert count_gpus({}, tmp_path) == 0
    write_files(tmp_path, *(f"dev/{name}" for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm")))
    assert count_gpus({}, tmp_path) == 2


def test_gpus_of_rocm_are_counted(tmp_path: Path) -> None:
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    for node, identifier in enumerate(("0", "51234", "9876")):
        write_files(nodes, f"{node}/gpu_id")
        (nodes / f"{node}/gpu_id").write_text(f"{identifier}\n")
    assert count_gpus({}, tmp_path) == 2


def test_gpus_of_wsl_are_counted_by_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def count(pointer: Any) -> int:
        pointer._obj.value = 3
        return 0

    driver = SimpleNamespace(cuInit=lambda _flags: 0, cuDeviceGetCount=count)
    write_files(tmp_path, "dev/dxg")
    monkeypatch.setattr("ctypes.CDLL", lambda _name: driver)
    assert count_gpus({}, tmp_path) == 3


def test_a_log_that_cannot_be_written_is_reported_before_the_step_starts(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    with pytest.raises(ResourceError, match=r"cannot write .*logs/train\.log: .*exists; to fix it"):
        prepare_log(tmp_path / "logs" / "train.log")


def test_log_end_of_an_attempt_excludes_earlier_lines(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "train.log"
    assert prepare_log(log) == 0
    log.write_text("earlier\n")
    began = prepare_log(log)
    with log.open("a") as file:
        file.write("now\n")
    assert read_log_end(log, began) == "now\n"


def test_python_in_a_launcher_command_is_our_interpreter() -> None:
    assert with_this_python(("mpirun", "-np", "2", "python", "-m", "train", "python")) == [
        "mpirun", "-np", "2", sys.executable, "-m", "train", "python",
    ]  # fmt: skip
    assert with_this_python(("python", "-m", "horovod", "python", "-c", "pass")) == [
        sys.executable, "-m", "horovod", sys.executable, "-c", "pass",
    ]  # fmt: skip


def test_no_fork_server_if_its_socket_cannot_be_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "task.py").write_text("class T: ...")
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    config = parse_config({"name": "x", "task": "task.py:T", "codec": "task.py:T"}, source="test")
    with fork_server(tmp_path, {}, config) as variables:
        assert variables == {}
