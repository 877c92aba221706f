"""Data parallelism: every process has the whole model, DistributedDataParallel or Horovod averages the gradients."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pipeline.system.errors import ConfigError, LostContact
from pipeline.system.wording import join_names
from train.checkpoint.load import SavedCheckpoint
from train.device.compilation import compile_whole
from train.parallel.base import MicroBatch, Strategy
from train.state import restored_buffers

# A DistributedDataParallel that outlives its process group deadlocks when it is freed: gloo's destructor joins
# threads that may wait for the interpreter lock it holds. So wrapped models are never freed, and the process
# ends by os._exit (in __main__).
_never_freed: list[nn.Module] = []

# torch 2.13 renamed the argument that broadcasts buffers at every forward pass, and warns about the old name.
_ARGUMENTS = inspect.signature(DistributedDataParallel).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _ARGUMENTS else "broadcast_buffers"

_UNFINISHED = "Expected to have finished reduction"  # in torch's message about parameters without a gradient
_MOST_NAMES = 8
_ONE_BUCKET_MB = 1 << 20  # on a CPU the exchange cannot overlap with computation, which needs the same cores


class DDPStrategy(Strategy):
    BUCKET_CAP_MB: float = 0  # 0: one bucket on CPU, torch's default on GPUs

    ddp: DistributedDataParallel  # from `warm_up` on

    def wrap_model(self) -> nn.Module:
        self._exchanged_bytes = sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)
        return self.model  # `warm_up` wraps it

    def warm_up(self, micro_batches: Callable[[], Iterable[MicroBatch]], resumes: bool = False) -> None:
        """Wrap the model, exchange the gradients of a pass and discard them.

        DistributedDataParallel reorders its buckets at the first forward pass after an exchange. After this one, always
        of the same batch, a resumed run adds up gradients in the same order as an uninterrupted one: with three
        processes or more the order changes the bits.

        It waits for the gradient of every parameter, unless it searches the graph of each pass for them. A pass
        without an exchange shows whether it must.
        """
        names = {name for own in self.group.gather(self._missing_gradients(micro_batches)) for name in own}
        if names and self.group.rank.first:
            print(describe_unreached(sorted(names)), flush=True)
        self._wrap(find_unused=bool(names), init_sync=not resumes)
        with restored_buffers(self.model):
            self.compute_gradient([replace(next(iter(micro_batches())), last=True)])
        self.model.zero_grad(set_to_none=True)
        self.traffic.sent_bytes = 0

    def _wrap(self, find_unused: bool, init_sync: bool) -> None:
        on_gpu = self.group.device.type == "cuda"
        buffers: dict[str, Any] = {_SYNC_BUFFERS: not has_only_running_statistics(self.model)}
        self.ddp = DistributedDataParallel(
            self.model,
            init_sync=init_sync,  # without it, buffers are sent with the first pass that reads them
            bucket_cap_mb=self.BUCKET_CAP_MB or (None if on_gpu else _ONE_BUCKET_MB),
            gradient_as_bucket_view=True,
            find_unused_parameters=find_unused,
            **buffers,
        )
        _never_freed.append(self.ddp)
        self.module = compile_whole(self.ddp, self.config)

    def _missing_gradients(self, micro_batches: Callable[[], Iterable[MicroBatch]]) -> list[str]:
        """Return the trained parameters without a gradient after one pass, which leaves no trace in the model.

        The random numbers of the pass do not matter: `micro_batches` seeds the generators again.
        """
        with restored_buffers(self.model):
            self.objective.backward(self.objective.loss(self.model, next(iter(micro_batches())).columns))
        missing = [name for name, p in self.model.named_parameters() if p.requires_grad and p.grad is None]
        self.model.zero_grad(set_to_none=True)
        return missing

    def compute_gradient(self, micro_batches: Iterable[MicroBatch]) -> Tensor:
        try:
            return super().compute_gradient(micro_batches)
        except RuntimeError as error:
            if _UNFINISHED not in str(error):
                raise
            raise ConfigError(
                "loss(): that of the first batch depends on all trained parameters, but that of another batch does "
                "not, so processes would wait for gradients forever; to fix it: let the loss of every batch depend on "
                "all of them, as in `loss + 0 * unused_output.sum()`, or freeze parameters with requires_grad_(False)"
            ) from error

    def gradient_sync(self, last: bool) -> contextlib.AbstractContextManager[object]:
        if not last:
            return self.ddp.no_sync()
        self.traffic.sent_bytes += self._exchanged_bytes
        return contextlib.nullcontext()


def describe_unreached(names: Sequence[str]) -> str:
    """Return the log line about parameters that the loss of the first batch does not depend on."""
    count = "1 trained parameter" if len(names) == 1 else f"{len(names)} trained parameters"
    return (
        f"warning: the loss of the first batch does not depend on {count}: {join_names(names, _MOST_NAMES)}; "
        "without a gradient they stay as they are"
    )


def has_only_running_statistics(model: nn.Module) -> bool:
    """Return whether all buffers are running statistics of norms, which no training pass reads.

    Then each process may keep its own; those of the first one are broadcast before weights are validated or saved.
    """
    norms = [module for module in model.modules() if hasattr(module, "track_running_stats")]
    statistics = {id(buffer) for norm in norms for buffer in norm.buffers(recurse=False)}
    return all(id(buffer) in statistics for buffer in model.buffers())


class BufferSnapshot:
    """Copies of a model's buffers, to put them back.

    All are copied each time: running statistics are written without changing the tensor's version.
    """

    def __init__(self, model: nn.Module) -> None:
        self._buffers = list(model.buffers())
        self._copies = [buffer.clone() for buffer in self._buffers]

    def take(self) -> None:
        for copy, buffer in zip(self._copies, self._buffers, strict=True):
            copy.copy_(buffer)

    @torch.no_grad()
    def restore(self) -> None:
        for copy, buffer in zip(self._copies, self._buffers, strict=True):
            buffer.copy_(copy)


_NEVER = 1 << 30  # backward passes before Horovod sends a gradient: more than a step has


class HorovodStrategy(Strategy):
    """Data parallelism with Horovod: its optimizer averages the gradients; all else uses torch's process group."""

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return Horovod's optimizer around the trainer's; weights become those of the first process."""
        self._horovod = load_horovod()
        self._horovod.init()
        if self._horovod.size() != self.group.size:
            raise ConfigError(
                f"train.strategy=horovod: Horovod sees {self._horovod.size()} of {self.group.size} processes; "
                "start them with horovodrun, as `pipe run` does"
            )
        is_fp16 = self.config.compress_kind == "fp16"
        trained_parameters = [
            (name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad
        ]
        compression = self._horovod.Compression
        horovod_optimizer: Any = self._horovod.DistributedOptimizer(
            optimizer,
            named_parameters=trained_parameters,
            compression=compression.fp16 if is_fp16 else compression.none,
        )
        self._exchanged_bytes = sum(p.numel() * (2 if is_fp16 else p.element_size()) for _, p in trained_parameters)
        # This context is never closed: backward() waits for the gradients itself, before they are scaled or clipped.
        self._manual_synchronize = contextlib.ExitStack()
        self._manual_synchronize.enter_context(horovod_optimizer.skip_synchronize())
        self._optimizer = horovod_optimizer
        self._horovod.broadcast_parameters(self.model.state_dict(), root_rank=0)
        distributed: torch.optim.Optimizer = horovod_optimizer
        return distributed

    def compute_gradient(self, micro_batches: Iterable[MicroBatch]) -> Tensor:
        total = super().compute_gradient(micro_batches)
        with self.stopwatch.waiting(), self._explain_lost_contact():
            self._optimizer.synchronize()
        self.traffic.sent_bytes += self._exchanged_bytes
        return total

    def gradient_sync(self, last: bool) -> contextlib.AbstractContextManager[object]:
        """Set when Horovod sends: it counts passes, but the number of micro-batches differs between slices."""
        self._optimizer.set_backward_passes_per_step(1 if last else _NEVER)
        return self._explain_lost_contact()

    def restore(self, optimizer: torch.optim.Optimizer, saved: SavedCheckpoint) -> None:
        """Broadcast what the first process has read, so that all certainly continue from the same state."""
        super().restore(optimizer, saved)
        self._horovod.broadcast_parameters(self.model.state_dict(), root_rank=0)
        self._horovod.broadcast_optimizer_state(optimizer, root_rank=0)

    @contextlib.contextmanager
    def _explain_lost_contact(self) -> Any:
        try:
            yield
        except RuntimeError as error:
            if type(error).__name__ != "HorovodInternalError":
                raise
            raise LostContact(
                f"rank {self.group.rank.rank} lost contact with another process, which was killed, failed or hangs; "
                "see the log"
            ) from error


def load_horovod() -> Any:
    """Import Horovod, which is no dependency: it must be built against the installed torch."""
    try:
        return importlib.import_module("horovod.torch")
    except ImportError as error:
        raise ConfigError(
            f"train.strategy=horovod: Horovod cannot be imported ({error}); "
            "to fix it: python -m train.install_horovod, or use train.strategy=ddp"
        ) from error
