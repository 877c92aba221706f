"""Run the process of a step on this machine, with its environment and, for training, a fork server."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from pipeline.contract.config import Config
from pipeline.contract.restarts import STEP_END_SECONDS, GiveUp, ProcessEnd, restart_after
from pipeline.contract.run import Run, StepRecord
from pipeline.contract.settings.stages import Train
from pipeline.plan import RESTARTED_FLAG, Decision, processes_per_node
from pipeline.system.files import unwritable
from pipeline.system.fork_server import (
    ADDRESS_VARIABLE,
    THREADS_VARIABLE,
    Process,
    can_serve,
    has_server,
    server_address,
    server_command,
    start_module,
)
from pipeline.system.processes import PARENT_WATCH_VARIABLE, count_driver_devices, describe_exit
from pipeline.system.sources import third_party_imports

Report = Callable[[str], None]
Ask = Callable[[str], bool]
_TICK_SECONDS = 0.1
_CHILDREN_TIMEOUT_SECONDS = 10.0
_LOG_END_BYTES = 1 << 16


@dataclass(frozen=True)
class LocalLauncher:
    """Runs processes that watch this one, their parent, and end with it."""

    root: Path
    tick: Callable[[], None]  # called ten times a second while a step runs
    grace_seconds: float = STEP_END_SECONDS  # between SIGTERM and SIGKILL
    forks: bool = False  # by the fork server that the environment names

    def launch(self, argv: tuple[str, ...], log: Path, env: Mapping[str, str]) -> int:
        """Run to the end and return the exit status; on Ctrl-C, end the process first."""
        with (
            log.open("ab") as output,
            child_process(argv, self.root, env, output, self.grace_seconds, forks=self.forks) as process,
        ):
            while True:
                try:
                    return process.wait(timeout=_TICK_SECONDS)
                except subprocess.TimeoutExpired:
                    self.tick()


@contextlib.contextmanager
def child_process(
    argv: tuple[str, ...],
    root: Path,
    env: Mapping[str, str],
    output: IO[Any] | int,
    grace_seconds: float = STEP_END_SECONDS,
    *,
    forks: bool = False,
    files: tuple[int, ...] = (),
) -> Iterator[Process]:
    """Start a process that ends, with its children, when the block ends or when this process dies.

    Its standard input is a socket, where `watch_parent` reads end-of-file when this process is gone. `files` stay open.
    """
    parent_end, child_end = socket.socketpair()
    environment = {**os.environ, **env, PARENT_WATCH_VARIABLE: "1"}
    process: Process
    if forks:
        _, _, module, *arguments = argv
        out = output if isinstance(output, int) else output.fileno()
        process = start_module(module, arguments, root, environment, (child_end.fileno(), out, out))
    else:
        process = subprocess.Popen(
            with_this_python(argv),
            cwd=root,
            env=environment,
            stdin=child_end.fileno(),
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=files,
            start_new_session=True,  # Ctrl-C reaches only this process, which decides
        )
    child_end.close()
    try:
        yield process
    finally:
        _terminate(process, grace_seconds)
        _wait_for_children(parent_end)


# They spend seconds on imports; `train` takes weights as they are.
FORKED_STEPS = ("pipeline.steps.check", "pipeline.steps.prepare", "train", "pipeline.evaluate", "export")
_OF_TRAINING = ("train.elastic.agent", "train.preload")
_EXPORTER = ("onnxscript.function_libs.torch_lib.ops", "torch.export._trace", "torch.onnx._internal.exporter._core")
# Without onnxruntime, which starts a thread.
OF_ALL_STEPS = (*_EXPORTER, "export.conversion.to_onnx", *reversed(_OF_TRAINING))
_NO_CUDA = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # a process that has called CUDA must not fork
_FORK_SAFE = {  # what may be imported before a fork, by the package that the user's code imports
    **{name: name for name in ("PIL", "pandas", "scipy", "sklearn", "torchvision")},
    "transformers": "transformers.modeling_utils",  # without which `import transformers` does little
}


@contextlib.contextmanager
def fork_server(
    root: Path, env: Mapping[str, str], config: Config, modules: Sequence[str] = _OF_TRAINING
) -> Iterator[dict[str, str]]:
    """Run a fork server with these modules, where that is possible; yield the variable that names it.

    It serves before it has imported the last of them. It also imports what the user's code does, as far as that is
    known to be harmless.
    """
    imported = third_party_imports(root, config.task, config.codec)
    packages = [module for name, module in _FORK_SAFE.items() if name in imported]
    with tempfile.TemporaryDirectory(prefix="pipe-") as folder, socket.socket(socket.AF_UNIX) as listener:
        path = Path(folder) / "fork-server"
        if not can_serve() or not _listen(listener, path):
            yield {}
            return
        argv = server_command(listener, [*packages, *modules[:-1]], modules[-1:])
        with child_process(argv, root, {**env, **_NO_CUDA}, subprocess.DEVNULL, files=(listener.fileno(),)):
            listener.close()
            yield {ADDRESS_VARIABLE: server_address(path, {**os.environ, **env})}


def _listen(listener: socket.socket, path: Path) -> bool:
    try:
        listener.bind(str(path))
    except OSError:  # the path is too long, or its file system has no sockets
        return False
    listener.listen()
    return True


def _wait_for_children(parent_end: socket.socket) -> None:
    """Let the remaining children read end-of-file, and wait until the last of them has closed its end."""
    with parent_end, contextlib.suppress(OSError):
        parent_end.shutdown(socket.SHUT_WR)
        parent_end.settimeout(_CHILDREN_TIMEOUT_SECONDS)
        parent_end.recv(1)


def _terminate(process: Process, grace_seconds: float) -> None:
    """Send SIGTERM; after the grace period, or on another Ctrl-C, kill the whole process group."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=grace_seconds)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def prepare_log(log: Path) -> int:
    """Create the log if necessary and return its size, where the output of this attempt begins."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            return file.tell()
    except OSError as error:
        raise unwritable(log, error) from error


def read_log_end(log: Path, start: int) -> str:
    """Return the last part of what was written after `start`."""
    with log.open("rb") as file:
        file.seek(max(start, log.stat().st_size - _LOG_END_BYTES))
        return file.read().decode(errors="replace")


def with_this_python(argv: tuple[str, ...]) -> list[str]:
    """Replace the `python` of `python -m`, wherever it is in the command, by the interpreter that runs this."""
    pairs = zip(argv, (*argv[1:], ""), strict=True)
    return [
        sys.executable if argument == "python" and following in ("-m", "-c") else argument
        for argument, following in pairs
    ]


DEFAULTS_OF_STEPS = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # required by torch's deterministic algorithms
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",  # in a log, a progress bar is hundreds of lines
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}


def pod_environment() -> dict[str, str]:
    """Return the environment of a step in a pod, where the number of threads is determined in the pod."""
    environment = step_environment(1, 1)
    del environment["OMP_NUM_THREADS"]
    return environment


def step_environment(processes: int, cores: int, threads: int = 0) -> dict[str, str]:
    """Return the environment of every step; unless `threads` is given, the cores are divided among its processes.

    Where the user has set a variable of `DEFAULTS_OF_STEPS` or OMP_NUM_THREADS, that value is used.
    """
    defaults = {"OMP_NUM_THREADS": str(max(1, cores // processes)), **DEFAULTS_OF_STEPS}
    return {
        "PYTHONSAFEPATH": "1",  # a train.py in the project must not shadow the package `train`
        "PYTHONUNBUFFERED": "1",
        **{name: os.environ.get(name, value) for name, value in defaults.items()},
        **({"OMP_NUM_THREADS": str(threads)} if threads else {}),
    }


_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def count_gpus(env: Mapping[str, str], system: Path = Path("/")) -> int:
    """Count the GPUs a step would see, without importing torch."""
    visible = next((env[name] for name in _VISIBLE if name in env), None)
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    if nvidia := list((system / "dev").glob("nvidia[0-9]*")):
        return len(nvidia)
    if (system / "dev/dxg").exists():  # WSL2, where only the driver knows
        return count_driver_devices()[0]
    nodes = (system / "sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")  # ROCm; CPUs have the id 0
    return sum(path.read_text().strip() != "0" for path in nodes)


class LocalExecutor:
    """Runs a step as a process that ends with this one."""

    def __init__(self, root: Path, cores: int, server: Mapping[str, str]) -> None:
        self._root, self._cores, self._server = root, cores, server

    def is_running(self, run: Run, decision: Decision) -> bool:  # noqa: ARG002 - as that of a cluster
        return False

    def execute(self, run: Run, record: StepRecord, tick: Callable[[], None]) -> int:
        """Run the process; start training again if its node was killed, as the node does with its workers."""
        train, log, launcher = run.config.train, run.log(record.step), LocalLauncher(self._root, tick)
        environment = {**training_environment(train, self._cores), **self._server}
        if record.argv[2] in FORKED_STEPS and has_server({**os.environ, **environment}):
            environment[THREADS_VARIABLE] = step_environment(1, count_cores(self._cores))["OMP_NUM_THREADS"]
            return replace(launcher, forks=True).launch(record.argv, log, environment)
        if record.step != "train":
            return launcher.launch(record.argv, log, step_environment(1, count_cores(self._cores)))
        status = launcher.launch(record.argv, log, environment)
        while status == -signal.SIGKILL:
            host = socket.gethostname()
            end = ProcessEnd(host, describe_exit(f"the node on {host}", status))
            if isinstance(restart_after(run.path, end, train.restarts), GiveUp):
                break
            status = launcher.launch((*record.argv, RESTARTED_FLAG), log, environment)
        return status


def training_environment(train: Train, cores: int) -> dict[str, str]:
    return step_environment(processes_per_node(train, count_gpus(os.environ)), count_cores(cores), train.threads)


def count_cores(cores: int) -> int:
    return cores or os.cpu_count() or 1
