"""The processes that train together: device, collectives, and the model they share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipeline.spec.config import Train
from pipeline.spec.errors import ConfigError
from pipeline.spec.rank import Rank

# A DistributedDataParallel that outlives its process group deadlocks when it is freed: gloo's destructor joins
# threads that may wait for the interpreter lock it holds. So wrapped models are never freed, and the process
# ends by os._exit (in __main__).
_wrapped: list[nn.Module] = []


@dataclass(frozen=True)
class Group:
    rank: Rank
    device: torch.device

    @property
    def size(self) -> int:
        return self.rank.world_size

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

    def share(self, value: Any) -> Any:
        """The first process's value."""
        return self.gather(value)[0]

    def wrap(self, model: nn.Module) -> nn.Module:
        if self.size == 1:
            return model
        _wrapped.append(DistributedDataParallel(model, gradient_as_bucket_view=True))
        return _wrapped[-1]

    def sync_buffers(self, model: nn.Module) -> None:
        """Everybody takes the first process's running statistics: those are the ones that get saved."""
        if self.size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)


@contextlib.contextmanager
def join(config: Train, rank: Rank) -> Iterator[Group]:
    """Meet the other processes; a process alone needs no meeting."""
    device = choose_device(config.device, rank)
    if rank.world_size == 1:
        yield Group(rank, device)
        return
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        timeout=timedelta(seconds=config.timeout_seconds),
        device_id=device if device.type == "cuda" else None,
    )
    yield Group(rank, device)
    dist.barrier()  # nobody leaves while another still reads from it
    dist.destroy_process_group()


def lost_contact(error: Exception) -> bool:
    """Whether another process ended or hangs, as the collectives' backends tell it."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())


def choose_device(wanted: str, rank: Rank) -> torch.device:
    """`auto` takes a GPU where torch sees one; asking for `cuda` never falls back silently."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("train.device=cuda, but torch sees no CUDA device; `pipe doctor` says why")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", rank.local_rank)
    torch.cuda.set_device(device)
    return device
