"""A process that ends when the `pipe` command that started it is gone, even by `kill -9`.

The runner gives a step one end of a pair of sockets as standard input and holds the other; a step hands it on
to the processes it starts. When the runner dies the kernel closes its end and every process reads end-of-file.
The node of training holds a pair of its own for its launcher, so that the end of either ends the workers.
mpirun hands it on to its first process alone, gives the others the null device, and ends them with the first.

Where one process stands among those that train or evaluate together.

How the end of a process is told: by its exit status, as Python knows it.

How torch's elastic agent, which starts the training processes of one machine, tells its node why it ended.

`host:port`, as people write it.

Whether ONNX Runtime can use CUDA here, asked of the driver itself, so that no session has to fail to find out.

Imports that stay cheap.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from pipeline.contract.errors import ConfigError
from pipeline.contract.files import digest_parts

PARENT_WATCH_VARIABLE = "PIPE_LEASH"
TERMINATED = 143  # what a shell reports for SIGTERM


def watch_parent(env: Mapping[str, str] | None = None) -> None:
    """Watch standard input in the background, but only when the runner asked for it."""
    env = os.environ if env is None else env
    if env.get(PARENT_WATCH_VARIABLE) == "1" and not os.path.samestat(os.fstat(0), os.stat(os.devnull)):
        threading.Thread(target=_wait_and_exit, name="leash", daemon=True).start()


def _wait_and_exit() -> None:
    while os.read(0, 4096):
        pass
    os._exit(TERMINATED)  # no clean-up: half-written outputs live under names nobody reads


@dataclass(frozen=True)
class Rank:
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_size: int = 0  # how many of them are on this machine; 0: the launcher does not tell
    job: str = ""  # equal in all processes of one launch and in no other launch, where the launcher tells
    master: str = ""  # `host:port` where they meet, where the launcher or the user tells

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Rank:
        """As the launcher sets it; a process started alone is rank 0 of 1."""
        env = os.environ if env is None else env
        master = f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}" if env.keys() >= {"MASTER_ADDR", "MASTER_PORT"} else ""
        for words in _LAUNCHERS:
            if words.rank in env and words.size in env:
                local_size = env.get(words.local_size, "")
                job = [env[name] for name in words.job if name in env]
                return cls(
                    rank=int(env[words.rank]),
                    local_rank=int(env.get(words.local_rank, "0")),
                    world_size=int(env[words.size]),
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
        """This rank's contiguous share of `count` items; shares differ by one at most, together they are all."""
        return range(count * self.rank // self.world_size, count * (self.rank + 1) // self.world_size)


class _Words(NamedTuple):
    """The variables of one launcher."""

    rank: str
    size: str
    local_rank: str
    local_size: str
    job: tuple[str, ...] = ()


# The nearest launcher counts: torchrun and horovodrun are themselves started by the others on a cluster.
_LAUNCHERS = (
    _Words("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", ("TORCHELASTIC_RUN_ID",)),
    _Words("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    _Words(  # Open MPI; its job number may come again, with mpirun's own address it does not
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE", "OMPI_MCA_orte_hnp_uri"),
    ),
    _Words("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH and its kin
    # srun alone sets the size of the step: the script of an sbatch is no process of a group, though it has a
    # number. Tasks per node are `2` on one machine, `2(x3)` on several.
    _Words(
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
        ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    ),
)


LEFT = 128 + signal.SIGTERM  # what a process that was asked to go exits with, as a shell reports it


def ending(who: str, status: int) -> str:
    """A negative status is the signal that ended it."""
    if status >= 0:
        return f"{who} exited with status {status}"
    known = -status in set(signal.Signals)
    name = signal.Signals(-status).name if known else f"signal {-status}"
    return f"{who} was killed ({name})" if -status == signal.SIGKILL else f"{who} was ended by {name}"


def asked_to_go(status: int) -> bool:
    """Whether it ended because somebody sent SIGTERM."""
    return status in (-signal.SIGTERM, LEFT)


class AgentStatus(IntEnum):
    DONE = 0
    FAILED = 1  # its processes did, and are not started again
    TOO_FEW = 81  # machines came within the time
    NO_STORE = 82  # the place where machines meet does not answer
    CLOSED = 83  # those who met there are through


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"train.rendezvous={address}: write it as host:port")
    return host.strip("[]"), int(port)


log = logging.getLogger(__name__)


def why_no_cuda(available: Sequence[str]) -> str:
    """One clause when CUDA cannot work, nothing when it should."""
    if "CUDAExecutionProvider" not in available:
        return "the installed onnxruntime has no CUDA provider (onnxruntime-gpu has)"
    if reason := _why_no_device():
        return reason
    _preload()
    return ""


def _why_no_device() -> str:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "this machine has no NVIDIA driver (libcuda.so.1)"
    count = ctypes.c_int(0)
    if code := driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return f"the NVIDIA driver answers error {code}"
    return "" if count.value else "the NVIDIA driver sees no device"


def _preload() -> None:
    """Load the CUDA libraries that stand in site-packages; what ONNX Runtime prints about it belongs in the log."""
    import onnxruntime  # heavy, and only where a session is about to be made

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        onnxruntime.preload_dlls()
    for line in said.getvalue().splitlines():
        log.info("preload: %s", line)


@contextmanager
def without(*packages: str) -> Iterator[None]:
    """Within it these count as not installed, unless they are in memory already.

    The Kubernetes client, which kserve imports too, takes kubernetes-validate along where it is installed: that
    compiles a grammar, which takes longer than all other imports of the service together.
    """
    hidden = [name for name in packages if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: Python's own sign for "not to be found"
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
