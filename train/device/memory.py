"""Estimate the memory of training before anything starts: `python -m train.device.memory FILE`.

One step is traced on fake tensors. They have a shape, a type and a device, but no memory, so that a model may be far
larger than this machine. The model is split and wrapped as in training, in a process group that exists only in the
trace. What no trace can see is left out: the workspaces of libraries, and the buffers of collectives.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from pipeline.contract.config import Config, override_config, parse_config
from pipeline.contract.data import Samples, open_split
from pipeline.contract.pretrained import planned_files
from pipeline.contract.run import describe
from pipeline.contract.settings.stages import Train
from pipeline.contract.task import SHARED_FOLDER, HasSampleLengths, Task, load_task, new_model
from pipeline.system.errors import ConfigError, PipelineError
from pipeline.system.processes import Rank
from pipeline.system.torch_private import (
    VALUE_ERRORS,
    FakeTensorMode,
    TorchDispatchMode,
    apply_to_tensors,
    disable_dispatch_modes,
    tree_leaves,
)
from train.device.accelerator import choose_precision
from train.optim import Precision, make_optimizer
from train.parallel import make_strategy
from train.parallel.base import MicroBatch, Objective, Strategy
from train.parallel.blocks import recompute_blocks
from train.parallel.ddp import DDPStrategy
from train.pretrained.adapter import add_adapter
from train.pretrained.materialize import BuildModel, Materializer, MetaModel
from train.pretrained.qlora import round_base_layers
from train.pretrained.source import Box, Entry, Read
from train.process_group import ProcessGroup, choose_device
from train.state import local_shard


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the tensors that operations return while they are alive, and the peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.peak = 0
        self._sizes: dict[int, int] = {}  # of live storages

    def __enter__(self) -> Self:
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self._resized()  # type: ignore[method-assign]  # no operation: FSDP frees so
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *exception: object) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operations on local shards come here one by one
        if function is torch.ops.aten._fused_sgd_.default and args[0][0].untyped_storage().device.type == "meta":
            return None  # it updates in place, and torch has none for fake tensors
        result = function(*args, **(kwargs or {}))
        self.count(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors; those that share a storage count once."""
        for tensor in tensors:
            storage = local_shard(tensor).untyped_storage()
            if id(storage) not in self._sizes:
                weakref.finalize(storage, self._set, id(storage), None)
                self._set(id(storage), storage.nbytes())

    def _set(self, storage: int, size: int | None) -> None:
        """Set the size of a storage; None: it is freed."""
        self.bytes += (size or 0) - self._sizes.pop(storage, 0)
        self.peak = max(self.peak, self.bytes)
        if size is not None:
            self._sizes[storage] = size

    def _resized(self) -> Any:
        resize = self._resize

        def resize_and_count(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if id(storage) in self._sizes:
                self._set(id(storage), storage.nbytes())
            return result

        return resize_and_count


@dataclass(frozen=True)
class Estimate:
    """The peak of one process in bytes, and what it consists of; gradients count in full."""

    bytes: int
    weights: int
    gradients: int
    optimizer: int  # and what the strategy keeps between steps, such as the outer weights of diloco
    activations: int  # the rest: inputs, activations and temporary tensors


_LOADED_SAMPLES = 32  # the shapes of a batch are those of so many samples
_TRACED_PASSES = 2  # of a step; further ones need as much memory as the second


def estimate_memory(task: Task, config: Config, group: ProcessGroup, build: BuildModel, samples: Samples) -> Estimate:
    """Trace two optimizer steps: in the second one the optimizer has its state from the beginning."""
    train = config.train.model_copy(update={"compile": False})
    refuse_untraceable(train)
    assert isinstance(train.batch_size, int)
    passes = min(train.accumulate, _TRACED_PASSES)
    count = -(-train.batch_size // ((train.elastic_shards or group.data_size) * train.accumulate))
    rows = samples.batch(range(min(count, _LOADED_SAMPLES, len(samples))))
    meta_model = MetaModel(build).model
    with FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as live:
        model = allocate(meta_model, group.device, rounded=config.model.adapter == "qlora")
        strategy = wrap_model(model, Objective(task, Precision(train.precision, group.device)), group, train, rows)
        if config.model.pretrained:  # then training reads only the process's own shards
            live.peak = live.bytes
        has_buckets = isinstance(strategy, BucketStrategy)
        optimizer = make_optimizer(strategy.model, train, task)
        before = live.bytes
        batch = {
            name: torch.empty((count, *column.shape[1:]), dtype=column.dtype, device=group.device)
            for name, column in rows.items()
        }
        inputs = live.bytes - before
        micro_batches = [
            MicroBatch(batch, count, 1 / passes, last=i == passes - 1, slice=number)
            for number in strategy.slices(train.batch_size)
            for i in range(passes)
        ]
        for _ in range(2):
            strategy.compute_gradient(micro_batches)
            optimizer.step()
            gradients = clear_gradients(strategy.model, keep=has_buckets)
            strategy.after_update(train.sync_every - 1)
        weights = size_of(model_tensors(strategy.model))
        kept = live.bytes - weights - inputs - gradients * has_buckets
    return Estimate(live.peak, weights, gradients, kept, live.peak - weights - gradients - kept)


def refuse_untraceable(train: Train) -> None:
    if train.batch_size == "auto":
        raise ConfigError("train.batch_size=auto chooses what fits when training starts")
    if train.strategy in ("parameter_server", "horovod"):
        raise ConfigError(f"train.strategy={train.strategy} cannot be traced")
    if train.pipeline_parallel > 1:
        raise ConfigError("train.pipeline_parallel cannot be traced")


class BucketStrategy(Strategy):
    """DistributedDataParallel in a trace; it keeps gradients between steps, and its own code needs real memory."""


def wrap_model(
    model: nn.Module, objective: Objective, group: ProcessGroup, train: Train, rows: dict[str, Tensor]
) -> Strategy:
    """Split and wrap a model as training does."""
    if train.recompute == "blocks":
        recompute_blocks(model)
    strategy = make_strategy(model, objective, group, train, Samples("train", rows))
    return BucketStrategy(model, objective, group, train) if isinstance(strategy, DDPStrategy) else strategy


def allocate(meta_model: nn.Module, device: torch.device, rounded: bool) -> nn.Module:
    """Give the parameters and buffers of a model tensors without values; `rounded`: as QLoRA does."""
    model = apply_to_tensors(meta_model, lambda tensor: tensor if tensor.is_meta else tensor.to(device).clone())
    names = model.named_parameters(remove_duplicate=False)
    materializer = Materializer({name: Unread(tuple(parameter.shape)) for name, parameter in names})
    if rounded:
        round_base_layers(model, materializer, device)
    materializer.materialize(model, device)
    return model


class Unread(NamedTuple):
    """The source of weights whose values do not matter."""

    shape: tuple[int, ...]
    entries: Sequence[Entry] = ()

    def fill(self, box: Box, out: Tensor, read: Read) -> None:
        """Leave the tensor as it is."""


def clear_gradients(model: nn.Module, keep: bool) -> int:
    """Return the bytes of all gradients, and free them unless they are kept."""
    size = size_of(parameter.grad for parameter in model.parameters() if parameter.grad is not None)
    if not keep:
        model.zero_grad(set_to_none=True)
    return size


def model_tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def size_of(tensors: Iterable[Tensor]) -> int:
    return sum(local_shard(tensor).nbytes for tensor in tensors)


class TracedGroup(ProcessGroup):
    """The first of several processes, of which the others do not exist."""

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.size

    def collect(self, value: Any) -> list[Any]:
        return self.gather(value)

    def total(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def mesh(self, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
        with disable_dispatch_modes():  # a mesh reads the values of tensors
            return super().mesh(shape, names)


@contextlib.contextmanager
def traced_group(train: Train, processes: int, device: torch.device) -> Iterator[ProcessGroup]:
    """Yield a group of so many processes, whose collectives do nothing."""
    rank = Rank(world_size=processes, local_size=processes)
    if processes > 1:
        dist.init_process_group("fake", rank=0, world_size=processes)
    try:
        yield TracedGroup(rank, device, train.tensor_parallel * train.pipeline_parallel)
    finally:
        if processes > 1:
            dist.destroy_process_group()


_FREE_MEMORY_SHARE = 0.8  # the rest is for data, buffers of collectives and other programs
_FREE_GPU_MEMORY_SHARE = 0.9


def available_bytes(device: torch.device, processes: int) -> int:
    """Return the memory that one of the processes on this machine may fill: most of what is free."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(_FREE_GPU_MEMORY_SHARE * (free + torch.cuda.memory_reserved(device)))
    return int(_FREE_MEMORY_SHARE * free_bytes() / processes)


def free_bytes(control: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the free memory of the machine, or of this container if that has less."""
    free: int = psutil.virtual_memory().available
    limit, usage = control / "memory.max", control / "memory.current"
    if limit.is_file() and usage.is_file() and (maximum := limit.read_text().strip()) != "max":
        free = min(free, int(maximum) - int(usage.read_text()) + _reclaimable(control / "memory.stat"))
    return max(0, free)


def _reclaimable(stat: Path) -> int:
    """Return the size of file caches, which the kernel drops when memory is needed."""
    if not stat.is_file():
        return 0
    values = dict(line.split() for line in stat.read_text().splitlines())
    return int(values.get("inactive_file", 0))


@dataclass(frozen=True)
class Request:
    """What `pipe plan` sends as JSON."""

    config: dict[str, Any]
    device: str
    processes: int  # of all machines
    local_processes: int
    limit: int | None  # bytes that one process may fill, 0: unknown; None: as much as is free here
    prepared: str  # output of the prepare step, where it is reused


def plan_memory(request: Request, root: Path) -> dict[str, Any]:
    """Return the estimate, the limit, and the first setting with which a step fits that does not fit otherwise."""
    config = parse_config(request.config, source="pipe.yaml")
    refuse_untraceable(config.train)
    device = choose_device(request.device, Rank())
    limit = available_bytes(device, request.local_processes) if request.limit is None else request.limit
    task = load_task(config.task, root)
    prepared = Path(request.prepared) if request.prepared else None
    with tempfile.TemporaryDirectory() as temporary:
        files = planned_files(task, config, root, prepared and prepared / SHARED_FOLDER, Path(temporary))
        samples = longest_first(task, open_split(task, "train", prepared), config.train.max_samples)

        def estimate(changed: Config) -> Estimate:
            build = partial(_build_model, task, changed, files)
            with traced_group(changed.train, request.processes, device) as group:
                return estimate_memory(task, changed, group, build, samples)

        answer = {**asdict(estimate(config)), "limit": limit}
        if 0 < limit < answer["bytes"]:
            answer["fix"] = find_fix(config, request.processes, device, limit, estimate)
    return answer


def _build_model(task: Task, config: Config, files: Path) -> nn.Module:
    return add_adapter(new_model(task, config, lambda: files), config.model)


def longest_first(task: Task, samples: Samples, most: int) -> Samples:
    """Return the first `most` samples, the longest ones first if the task has their lengths: they come together."""
    first = samples.first(most)
    if first.is_stream or not isinstance(task, HasSampleLengths):
        return first
    lengths = torch.as_tensor(task.sample_lengths(samples.source))[: len(first)]
    return first.rearranged(lengths.argsort(descending=True)[:_LOADED_SAMPLES].tolist())


def find_fix(
    config: Config, processes: int, device: torch.device, limit: int, estimate: Callable[[Config], Estimate]
) -> dict[str, Any] | None:
    """Return the first setting with which a step fits, and what it needs then."""
    for setting in possible_fixes(config.train, processes, device):
        try:
            needed = estimate(override_config(config, [setting])).bytes
        except PipelineError:  # it does not go with other settings, or with the model
            continue
        if needed <= limit:
            return {"setting": setting, "bytes": needed}
    return None


def possible_fixes(train: Train, processes: int, device: torch.device) -> Iterator[str]:
    """Yield settings that lower the memory of a step, those that change the least first."""
    assert isinstance(train.batch_size, int)
    copies = train.elastic_shards or processes // (train.tensor_parallel * train.pipeline_parallel)
    accumulate = 2 * train.accumulate
    while accumulate * copies <= train.batch_size:
        yield f"train.accumulate={accumulate}"
        accumulate *= 2
    if train.recompute == "none":
        yield "train.recompute=blocks"
    if choose_precision(train.precision, device) == "fp32":
        yield "train.precision=bf16"
    if train.strategy == "ddp" and processes > 1:
        yield "train.strategy=fsdp"


def main(argv: Sequence[str]) -> int:
    """Replace the request in a file by the answer, or by the reason why there is none."""
    root, file = Path.cwd(), Path(argv[0])
    try:
        answer = plan_memory(Request(**json.loads(file.read_text())), root)
    except PipelineError as error:
        answer = {"reason": str(error)}
    except VALUE_ERRORS as error:
        answer = {"reason": f"it depends on the values of tensors: {describe(error, root)}"}
    except Exception as error:  # the user's code
        answer = {"reason": describe(error, root)}
    file.write_text(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
