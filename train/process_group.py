"""The processes that train together: device, collectives, and the model they share.

Where processes meet when no launcher tells: the first one opens a store and publishes its address.

Where this process stands in the step, for whoever asks why the others wait.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import Store, TCPStore  # torch.distributed hands them on, unseen by type checkers
from torch.distributed import DistError

from pipeline.contract.errors import ConfigError, LostContact, StageError
from pipeline.contract.files import write_json
from pipeline.contract.processes import Rank, split_address
from pipeline.contract.settings.stages import Train

_LOOK_SECONDS = 0.1
_KNOCK_SECONDS = 5
_HERE = "127.0.0.1"
_MARK = "mark"  # the key of what tells this store from any other


def meet(rank: Rank, address: str, directory: Path, timeout_seconds: int) -> Store | None:
    """The store all meet in; None where the environment names it, as under torchrun."""
    timeout = timedelta(seconds=timeout_seconds)
    if rank.master:
        return None
    if address:
        host, port = split_address(address)
        return TCPStore(host, port, rank.world_size, rank.first, timeout)
    place = place_of(rank, directory)
    return _open(rank, place, timeout) if rank.first else _find(rank, place, timeout)


def place_of(rank: Rank, directory: Path) -> Path:
    """The file with the address, of this launch alone where the launcher gives it a name."""
    return directory / f"meeting-{rank.job or 'unnamed'}.json"


def _open(rank: Rank, place: Path, timeout: timedelta) -> Store:
    """On a free port, that of this machine alone where nobody comes from another."""
    listener = _listen(rank.all_local)
    port, mark = listener.getsockname()[1], secrets.token_hex(8)
    store = TCPStore(
        _HERE, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    store.set(_MARK, mark)
    write_json(place, {"host": _HERE if rank.all_local else socket.gethostname(), "port": port, _MARK: mark})
    return store


def _listen(all_local: bool) -> socket.socket:
    if all_local:
        return socket.create_server((_HERE, 0))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _find(rank: Rank, place: Path, timeout: timedelta) -> Store:
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        if (store := _knock(place)) is not None:
            store.set_timeout(timeout)
            return store
        time.sleep(_LOOK_SECONDS)
    raise StageError(
        f"rank {rank.rank} on {socket.gethostname()} waited {timeout.total_seconds():.0f} s for rank 0 to publish "
        f"where to meet ({place.name} in {place.parent}); the run directory must be shared by all machines, "
        "or set train.rendezvous=host:port"
    )


def _knock(place: Path) -> Store | None:
    """The store behind a published address; None when there is none yet.

    An address left by an earlier launch leads nowhere, or to a store that does not know the mark beside it.
    """
    try:
        told = json.loads(place.read_text())
        socket.create_connection((told["host"], told["port"]), _KNOCK_SECONDS).close()
        store = TCPStore(told["host"], told["port"], timeout=timedelta(seconds=_KNOCK_SECONDS), wait_for_workers=False)
        known = store.check([_MARK]) and store.get(_MARK).decode() == told[_MARK]
    except (OSError, DistError):
        return None
    return store if known else None


# In the order of a step: who waits for another is further than that one.
Phase = Literal["start", "data", "forward and backward", "update", "exchange of weights", "validation", "checkpoint"]
PHASES: tuple[Phase, ...] = get_args(Phase)


class Watch:
    def __init__(self) -> None:
        self.position: tuple[int, Phase] = (0, "start")

    def at(self, step: int, phase: Phase) -> None:
        """A plain assignment: cheap enough for every phase of every step."""
        self.position = (step, phase)

    def again(self) -> None:
        """The phase goes on, and something in it was done: a new tuple, which is what the watchman looks for."""
        step, phase = self.position
        self.position = (step, phase)


_MARGIN_SECONDS = 60  # a collective waits longer than the watchman, who knows for whom


@dataclass(frozen=True)
class Group:
    rank: Rank
    device: torch.device
    model_size: int = 1  # processes that hold one copy of the model together (tensor or pipeline parallel)
    watch: Watch = field(default_factory=Watch, compare=False)

    @property
    def size(self) -> int:
        return self.rank.world_size

    @property
    def data_size(self) -> int:
        """Copies of the model that share out each batch."""
        return self.size // self.model_size

    @property
    def data_rank(self) -> int:
        return self.rank.rank // self.model_size

    def slice_of(self, count: int) -> range:
        """Equal shares of a batch or a split, by copies of the model."""
        return Rank(self.data_rank, world_size=self.data_size).slice_of(count)

    def total(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over all processes, in double precision."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        found: list[float] = tensor.tolist()
        return found

    def gather(self, value: Any) -> list[Any]:
        """Everybody's value, by rank, known to everybody."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def collect(self, value: Any) -> list[Any]:
        """Everybody's value, by rank, known to the first process alone."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank.first else None
        dist.gather_object(value, values)
        return values or []

    def share(self, value: Any) -> Any:
        """The first process's value."""
        return self.gather(value)[0]

    def sync_buffers(self, model: nn.Module) -> None:
        """Everybody takes the first process's running statistics: those are the ones that get saved."""
        if self.size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)


@contextlib.contextmanager
def join(config: Train, rank: Rank, directory: Path) -> Iterator[Group]:
    """Meet the other processes, in the run directory where no launcher says where; one alone needs no meeting."""
    device = choose_device(config.device, rank)
    model_size = config.tensor * config.pipeline
    if rank.world_size % model_size:
        word = "tensor" if config.tensor > 1 else "pipeline"
        raise ConfigError(
            f"train.{word}={model_size}: {rank.world_size} processes cannot be shared out; "
            f"make train.processes a multiple of {model_size}"
        )
    if config.expert > 1 and rank.world_size // model_size % config.expert:
        raise ConfigError(
            f"train.expert={config.expert}: {rank.world_size // model_size} copies cannot share the experts; "
            f"make train.processes a multiple of {config.expert * model_size}"
        )
    if rank.world_size == 1:
        yield Group(rank, device)
        return
    _connect(config, rank, device, directory)
    try:
        yield Group(rank, device, model_size)
        dist.barrier()  # nobody leaves while another still reads from it
    except Exception as error:
        if not lost_contact(error):
            raise
        raise LostContact(
            f"rank {rank.rank} lost contact with another process, which was killed, failed or hangs; "
            "the log tells which"
        ) from error
    dist.destroy_process_group()


def _connect(config: Train, rank: Rank, device: torch.device, directory: Path) -> None:
    seconds = config.timeout_seconds
    try:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=meet(rank, config.rendezvous, directory, seconds),
            rank=rank.rank,
            world_size=rank.world_size,
            timeout=timedelta(seconds=seconds + _MARGIN_SECONDS),
            # Bound to a device, NCCL wants everybody at the making of every further group; the parameter server's
            # links are groups of two.
            device_id=device if device.type == "cuda" and config.sync != "parameter_server" else None,
        )
    except dist.DistBackendError as error:
        first_line = str(error).strip().partition("\n")[0]
        raise LostContact(f"rank {rank.rank} on {socket.gethostname()}: NCCL did not start: {first_line}") from error
    except dist.DistError as error:
        raise LostContact(
            f"rank {rank.rank} on {socket.gethostname()}: not all {rank.world_size} processes came to the meeting "
            f"within {seconds} s; the log tells which failed, or raise train.timeout_seconds"
        ) from error
    if rank.first:
        place_of(rank, directory).unlink(missing_ok=True)  # all have met


def lost_contact(error: Exception) -> bool:
    """Whether another process ended or hangs, as the collectives' backends tell it."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())


def choose_device(wanted: str, rank: Rank) -> torch.device:
    """`auto` takes a GPU where torch sees one; asking for `cuda` never falls back silently."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("train.device=cuda, but torch sees no CUDA device; `pipe doctor` says why")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count > 1 and rank.local_rank >= count:
        raise ConfigError(
            f"train.processes: process {rank.local_rank + 1} of this machine finds only {count} GPUs; "
            "lower it, or set train.device=cpu"
        )
    device = torch.device("cuda", 0 if count == 1 else rank.local_rank)  # a launcher may show each process its own
    torch.cuda.set_device(device)
    return device
