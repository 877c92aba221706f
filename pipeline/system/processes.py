"""Processes: watching the parent, the rank from the launcher's variables, exit statuses, CUDA for ONNX Runtime.

A process ends when the `pipe` command that started it is gone, even by `kill -9`. The runner gives a step one end of
a pair of sockets as standard input and holds the other; a step passes it on to the processes it starts. When the
runner dies the kernel closes its end, and every process reads end-of-file. The node of training holds a pair of its
own for its launcher, so that the end of either ends the workers. mpirun passes standard input on to its first process
alone, gives the others the null device, and ends them with the first. A process that runs the user's code moves its end
elsewhere, so that its standard input is empty: `input()` must fail there, and not wait for ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from pipeline.system.errors import ConfigError
from pipeline.system.files import digest_parts

PARENT_WATCH_VARIABLE = "PIPE_PARENT_WATCH"
TERMINATED = 128 + signal.SIGTERM  # exit status of a process that ends on SIGTERM, as a shell reports it


def watch_parent(*, passes_on: bool = False) -> None:
    """Watch standard input in the background, but only where the runner has set the variable, and make it empty.

    `passes_on`: leave it as it is for other processes, which are started with it and watch it as well.
    """
    if os.environ.get(PARENT_WATCH_VARIABLE) != "1" or os.path.samestat(os.fstat(0), os.stat(os.devnull)):
        return
    watched = 0
    if not passes_on:
        watched, null = os.dup(0), os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
    threading.Thread(target=_wait_and_exit, args=(watched,), name="parent-watch", daemon=True).start()


def _wait_and_exit(watched: int) -> None:
    while os.read(watched, 4096):
        pass
    os._exit(TERMINATED)  # no clean-up: half-written outputs have temporary names


@dataclass(frozen=True)
class Rank:
    """The place of one process among those that train or evaluate together."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_size: int = 0  # processes on this machine; 0: unknown
    job: str = ""  # id of the launch; empty: the launcher has none
    master: str = ""  # `host:port` where the processes meet; empty: unknown

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Rank:
        """Read the launcher's variables; without any, this is rank 0 of 1."""
        env = os.environ if env is None else env
        master = f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}" if env.keys() >= {"MASTER_ADDR", "MASTER_PORT"} else ""
        for variables in _LAUNCHERS:
            if variables.rank in env and variables.size in env:
                local_size = env.get(variables.local_size, "")
                job = [env[name] for name in variables.job if name in env]
                return cls(
                    rank=int(env[variables.rank]),
                    local_rank=int(env.get(variables.local_rank, "0")),
                    world_size=int(env[variables.size]),
                    local_size=int(local_size) if local_size.isdecimal() else 0,
                    job=digest_parts(job)[:12] if job else "",
                    master=master,
                )
        return cls()

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def all_local(self) -> bool:
        return self.local_size == self.world_size

    def slice_of(self, count: int) -> range:
        """Return this rank's contiguous slice of `count` items; slice sizes differ by one at most."""
        return range(count * self.rank // self.world_size, count * (self.rank + 1) // self.world_size)


class _RankVariables(NamedTuple):
    """The names of one launcher's variables."""

    rank: str
    size: str
    local_rank: str
    local_size: str
    job: tuple[str, ...] = ()


# The nearest launcher counts: torchrun and horovodrun are themselves started by the others on a cluster.
_LAUNCHERS = (
    _RankVariables("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", ("TORCHELASTIC_RUN_ID",)),
    _RankVariables("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    _RankVariables(  # Open MPI: its job number alone may be reused, together with mpirun's address it is unique
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE", "OMPI_MCA_orte_hnp_uri"),
    ),
    _RankVariables("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH and its relatives
    # Only srun sets the size of the step: the script of an sbatch has a SLURM_PROCID but belongs to no group.
    # Tasks per node are `2` on one machine, `2(x3)` on several.
    _RankVariables(
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
        ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    ),
)


def describe_exit(process: str, status: int) -> str:
    """Say in words how a process ended; a negative status is the signal that ended it."""
    if status >= 0:
        return f"{process} exited with status {status}"
    is_standard = -status in set(signal.Signals)
    name = signal.Signals(-status).name if is_standard else f"signal {-status}"
    return f"{process} was killed ({name})" if -status == signal.SIGKILL else f"{process} was ended by {name}"


def raise_interrupt(signal_number: int, _frame: object) -> None:
    """Handle a signal like Ctrl-C: what was done is kept, and can be continued."""
    raise KeyboardInterrupt(signal_number)


def exit_by_exception(signal_number: int, _frame: object) -> None:
    """Handle a signal so that what is held is released: processes are ended, a lease, a canary."""
    sys.exit(128 + signal_number)


@contextmanager
def deferred_signals() -> Iterator[Callable[[], None]]:
    """Hold SIGTERM and SIGINT back until the yielded function is called, so that a started process is known by then."""
    received: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
    handlers = {number: signal.signal(number, lambda number, _: received.append(number)) for number in numbers}

    def deliver() -> None:
        while handlers:
            signal.signal(*handlers.popitem())
        while received:
            signal.raise_signal(received.pop())

    try:
        yield deliver
    finally:
        deliver()


def end_group(process: subprocess.Popen[Any], grace_seconds: float) -> None:
    """Send SIGTERM to a process group and wait for its first process; then kill what is left of the group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(grace_seconds)


def was_terminated(status: int) -> bool:
    """Return whether SIGTERM ended the process."""
    return status in (-signal.SIGTERM, TERMINATED)


class AgentStatus(IntEnum):
    """Exit status of the agent, which starts the training processes of one machine."""

    DONE = 0
    FAILED = 1  # its processes failed and it does not restart them
    TOO_FEW = 81  # too few machines came within the timeout
    NO_STORE = 82  # the rendezvous store does not answer
    CLOSED = 83  # the other machines have finished
    LOST_DEVICE = 84  # a GPU of this machine is gone


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"train.rendezvous={address}: write it as host:port")
    return host.strip("[]"), int(port)


log = logging.getLogger(__name__)


def cuda_problem(available: Sequence[str]) -> str:
    """Return why ONNX Runtime cannot use CUDA here; empty if it should work."""
    if "CUDAExecutionProvider" not in available:
        return "the installed onnxruntime has no CUDA provider (onnxruntime-gpu has)"
    devices, reason = count_driver_devices()
    if reason or not devices:
        return reason or "the NVIDIA driver sees no device"
    _preload_cuda()
    return ""


def count_driver_devices() -> tuple[int, str]:
    """Query the driver itself, so that no session has to fail first; return its devices, and why there is no answer."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0, "this machine has no NVIDIA driver (libcuda.so.1)"
    count = ctypes.c_int(0)
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return (0, f"the NVIDIA driver returns error {code}") if code else (count.value, "")


def _preload_cuda() -> None:
    """Load the CUDA libraries in site-packages, and log what ONNX Runtime prints about it."""
    import onnxruntime  # slow to import

    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        onnxruntime.preload_dlls()
    for line in output.getvalue().splitlines():
        log.info("preload: %s", line)


@contextmanager
def hide_packages(*packages: str) -> Iterator[None]:
    """Make packages count as not installed, unless they are imported already.

    The Kubernetes client imports kubernetes-validate where it is installed, which compiles a grammar for a second.
    """
    hidden = [name for name in packages if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None makes an import fail
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
