"""The processes that train together: how they meet, their device and collectives, and each one's heartbeat.

Without a rendezvous address, the first process opens a store and publishes its address in the run directory.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DistError, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from pipeline.contract.restarts import collective_seconds
from pipeline.contract.settings.stages import Train
from pipeline.system.errors import ConfigError, DeviceFault, LostContact, PipelineError, StageError
from pipeline.system.files import read_object, write_json
from pipeline.system.processes import Rank, split_address

_POLL_SECONDS = 0.1
_CONNECT_TIMEOUT_SECONDS = 5
_LOCALHOST = "127.0.0.1"
_STORE_ID = "mark"  # key of an id that is unique to this store


def open_store(rank: Rank, address: str, directory: Path, timeout_seconds: int) -> Store | None:
    """Open the store in which all meet; None where the environment names it, as under torchrun."""
    timeout = timedelta(seconds=timeout_seconds)
    if rank.master:
        return None
    if address:
        host, port = split_address(address)
        return TCPStore(host, port, rank.world_size, rank.first, timeout)
    file = rendezvous_file(rank, directory)
    return _serve_store(rank, file, timeout) if rank.first else _wait_for_store(rank, file, timeout)


def rendezvous_file(rank: Rank, directory: Path) -> Path:
    """Return the file with the address; it belongs to one launch where the launcher has an id for it."""
    return directory / f"meeting-{rank.job or 'unnamed'}.json"


def _serve_store(rank: Rank, file: Path, timeout: timedelta) -> Store:
    """Open a store on a free port, on localhost if all processes are on this machine."""
    listener = _listen(rank.all_local)
    port, store_id = listener.getsockname()[1], secrets.token_hex(8)
    store = TCPStore(
        _LOCALHOST, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    store.set(_STORE_ID, store_id)
    write_json(
        file, {"host": _LOCALHOST if rank.all_local else socket.gethostname(), "port": port, _STORE_ID: store_id}
    )
    return store


def _listen(all_local: bool) -> socket.socket:
    if all_local:
        return socket.create_server((_LOCALHOST, 0))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _wait_for_store(rank: Rank, file: Path, timeout: timedelta) -> Store:
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        if (store := _connect_to_store(file)) is not None:
            store.set_timeout(timeout)
            return store
        time.sleep(_POLL_SECONDS)
    raise StageError(
        f"rank {rank.rank} on {socket.gethostname()} waited {timeout.total_seconds():.0f} s for rank 0 to publish "
        f"where to meet ({file.name} in {file.parent}); to fix it, share the run directory among all machines, "
        "or set train.rendezvous=host:port"
    )


def _connect_to_store(file: Path) -> Store | None:
    """Return the store at the published address; None when there is none yet.

    An address left by an earlier launch leads nowhere, or to a store with another id.
    """
    try:
        published = read_object(file)
        socket.create_connection((published["host"], published["port"]), _CONNECT_TIMEOUT_SECONDS).close()
        store = TCPStore(
            published["host"],
            published["port"],
            timeout=timedelta(seconds=_CONNECT_TIMEOUT_SECONDS),
            wait_for_workers=False,
        )
        matches = store.check([_STORE_ID]) and store.get(_STORE_ID).decode() == published[_STORE_ID]
    except (OSError, KeyError, PipelineError, DistError):
        return None
    return store if matches else None


# In the order of a step: a process waits only for processes that are not as far.
Phase = Literal["start", "data", "forward and backward", "update", "exchange of weights", "validation", "checkpoint"]
PHASES: tuple[Phase, ...] = get_args(Phase)


class Heartbeat:
    """Where this process is in its step; the watchdog reads it from another thread."""

    def __init__(self) -> None:
        self.position: tuple[int, Phase] = (0, "start")

    def at(self, step: int, phase: Phase) -> None:
        """Enter a phase; a plain assignment, cheap enough for every phase of every step."""
        self.position = (step, phase)

    def beat(self) -> None:
        """Report progress within a phase: the watchdog looks for a new tuple."""
        step, phase = self.position
        self.position = (step, phase)


@dataclass(frozen=True)
class ProcessGroup:
    """The training processes as this one sees them; collectives work for a single process too."""

    rank: Rank
    device: torch.device
    model_size: int = 1  # processes per copy of the model (tensor or pipeline parallel)
    heartbeat: Heartbeat = field(default_factory=Heartbeat, compare=False)
    timeout: timedelta = timedelta(minutes=30)  # of collectives

    def mesh(self, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
        """Arrange all processes in a mesh; in the groups of `init_device_mesh` torch's own timeouts would hold."""
        ranks = torch.arange(self.size).reshape(shape)
        groups = []
        for axis, length in enumerate(shape):
            rows = ranks.movedim(axis, -1).reshape(-1, length).tolist()
            own, _ = dist.new_subgroups_by_enumeration(rows, timeout=self.timeout)  # type: ignore[no-untyped-call]
            groups.append(own)
        return DeviceMesh.from_group(groups, self.device.type, mesh=ranks, mesh_dim_names=names)

    @property
    def size(self) -> int:
        return self.rank.world_size

    @property
    def data_size(self) -> int:
        """Number of copies of the model; each batch is divided among them."""
        return self.size // self.model_size

    @property
    def data_rank(self) -> int:
        return self.rank.rank // self.model_size

    def slice_of(self, count: int) -> range:
        """Return this copy's slice of a batch or split; sizes differ by one at most."""
        return range(count * self.data_rank // self.data_size, count * (self.data_rank + 1) // self.data_size)

    def total(self, values: Sequence[float]) -> list[float]:
        """Sum element-wise over all processes, in double precision."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        totals: list[float] = tensor.tolist()
        return totals

    def maximum(self, tensor: Tensor) -> Tensor:
        """Take the element-wise maximum over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, by rank, on every process."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def collect(self, value: Any) -> list[Any]:
        """Return the values of all processes, by rank, on the first process only."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank.first else None
        dist.gather_object(value, values)
        return values or []

    def share(self, value: Any) -> Any:
        """Return the first process's value."""
        return self.gather(value)[0]

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Copy the first process's tensors to all, in place."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor.detach(), 0)


@contextlib.contextmanager
def join_process_group(config: Train, rank: Rank, directory: Path) -> Iterator[ProcessGroup]:
    """Join the other processes; without an address from the launcher they meet in the run directory."""
    device = choose_device(config.device, rank)
    model_size = config.tensor_parallel * config.pipeline_parallel
    split = (f"{name}={getattr(config, name)}" for name in ("tensor_parallel", "pipeline_parallel"))
    copies = config.weight_copies if rank.world_size > 1 else 1
    for setting, factor in (
        (" * train.".join(name for name in split if not name.endswith("=1")), model_size),
        (f"expert_parallel={config.expert_parallel}", config.expert_parallel * model_size),
        (f"weight_copies={copies}", copies * model_size),
    ):
        if rank.world_size % factor:
            raise ConfigError(
                f"train.{setting}: {rank.world_size} processes cannot be divided evenly; to fix it, make "
                f"train.processes a multiple of {factor}"
            )
    if rank.world_size == 1:
        yield ProcessGroup(rank, device)
        return
    _connect(config, rank, device, directory)
    try:
        yield ProcessGroup(rank, device, model_size, timeout=_collective_timeout(config))
        dist.barrier()  # stay while another process may still read from this one
    except Exception as error:
        if not is_lost_contact(error):
            raise
        raise LostContact(
            f"rank {rank.rank} lost contact with another process, which was killed, failed or hangs; see the log"
        ) from error
    dist.destroy_process_group()


def _connect(config: Train, rank: Rank, device: torch.device, directory: Path) -> None:
    seconds = config.timeout_seconds
    try:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=open_store(rank, config.rendezvous, directory, seconds),
            rank=rank.rank,
            world_size=rank.world_size,
            timeout=_collective_timeout(config),
            # Bound to a device, NCCL needs all processes to create any further group; the parameter server has
            # groups of two.
            device_id=device if device.type == "cuda" and config.strategy != "parameter_server" else None,
        )
    except dist.DistBackendError as error:
        raise LostContact(
            f"rank {rank.rank} on {socket.gethostname()}: NCCL did not start: {nccl_cause(error)}"
        ) from error
    except dist.DistError as error:
        raise LostContact(
            f"rank {rank.rank} on {socket.gethostname()}: not all {rank.world_size} processes joined "
            f"within {seconds} s; see the log for the one that failed, or raise train.timeout_seconds"
        ) from error
    if rank.first:
        rendezvous_file(rank, directory).unlink(missing_ok=True)  # all have met


def _collective_timeout(config: Train) -> timedelta:
    return timedelta(seconds=collective_seconds(config.timeout_seconds))


def nccl_cause(error: Exception) -> str:
    """Return the last line of NCCL's message: the first one only names the line of torch that called it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() not in ("", "Last error:")]
    return lines[-1] if lines else type(error).__name__


# Parts of the messages of CUDA and HIP. Not among them: an assertion on the device, or an illegal memory access, which
# are errors of the program.
_DEVICE_FAULTS = (
    "ecc error", "nvlink", "xid", "unspecified launch failure", "hardware stack error", "gpu is lost",
    "gpu has fallen off the bus", "devices unavailable", "device(s) is/are busy or unavailable",
    "no cuda-capable device is detected", "no cuda gpus are available", "no hip gpus are available",
    "driver shutting down", "launch timed out", "system not yet initialized", "contained by",
)  # fmt: skip


def is_device_fault(error: BaseException) -> bool:
    """Return whether an accelerator failed, which torch raises like any error of the user's code."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        re.search(rf"\b{re.escape(part)}", text) is not None for part in _DEVICE_FAULTS
    )


@contextlib.contextmanager
def explain_device_faults(rank: Rank) -> Iterator[None]:
    """Raise DeviceFault for a fault of an accelerator within the context."""
    try:
        yield
    except RuntimeError as error:
        if not is_device_fault(error):
            raise
        first_line = str(error).strip().partition("\n")[0]
        raise DeviceFault(f"rank {rank.rank} on {socket.gethostname()}: its GPU failed: {first_line}") from error


def is_lost_contact(error: Exception) -> bool:
    """Return whether a collective failed because another process ended or hangs."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())


# Variables of launchers whose processes all see the same GPUs; srun and mpirun may show each process only its own.
_LAUNCHERS_THAT_SHOW_ALL = ("TORCHELASTIC_RUN_ID", "HOROVOD_RANK")


def choose_device(setting: str, rank: Rank) -> torch.device:
    """Return the device: `auto` takes a GPU where torch sees one, `cuda` never falls back silently."""
    if setting == "cuda" and not torch.cuda.is_available():
        raise ConfigError("train.device=cuda, but torch sees no CUDA device; to see why, run `pipe doctor`")
    if setting == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    shows_each_its_own = count == 1 and not any(name in os.environ for name in _LAUNCHERS_THAT_SHOW_ALL)
    if rank.local_rank >= count and not shows_each_its_own:
        raise ConfigError(
            f"train.processes: process {rank.local_rank + 1} of this machine finds only {count} "
            f"GPU{'s' if count > 1 else ''}; to fix it, lower it, or set train.device=cpu"
        )
    device = torch.device("cuda", 0 if shows_each_its_own else rank.local_rank)
    torch.cuda.set_device(device)
    return device
