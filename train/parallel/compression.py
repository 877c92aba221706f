"""Gradient compression for DistributedDataParallel over slow links: fp16, bf16, PowerSGD and top-k.

A compressor averages one bucket of gradients at a time, as a communication hook of DistributedDataParallel. PowerSGD
and top-k are lossy: what one step does not send is added to the gradient of the next one (error feedback). bf16 is
torch's own hook. torch's hooks for fp16 and PowerSGD are not used: its fp16 overflows and loses small gradients, and
its PowerSGD deadlocks on gloo when there are several buckets.
"""
# No `from __future__ import annotations`: DistributedDataParallel compares the annotations of a hook as objects.

import abc
import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.futures import Future

from pipeline.contract.settings.stages import Train
from train.parallel.base import MicroBatch, Stopwatch, Traffic
from train.parallel.ddp import DDPStrategy
from train.state import strip_prefix


class CompressedDDPStrategy(DDPStrategy):
    def warm_up(self, micro_batches: Callable[[], Iterable[MicroBatch]], resumes: bool = False) -> None:
        """Register the hook when the final order of the buckets is known: remainders are kept by bucket."""
        self._compressor = make_compressor(self.config, self.traffic, self.stopwatch, self.group.device)
        super().warm_up(micro_batches, resumes)
        self.ddp.register_comm_hook(self._compressor, compression_hook)

    def gradient_sync(self, last: bool) -> contextlib.AbstractContextManager[object]:
        if not last:
            return self.ddp.no_sync()
        self._compressor.rescale(self.objective.precision.scaler.get_scale())
        return contextlib.nullcontext()

    def process_state(self) -> Mapping[str, Tensor]:
        return self._compressor.state()

    def restore_process_state(self, tensors: Mapping[str, Tensor]) -> None:
        self._compressor.restore(tensors)


class Compressor(abc.ABC):
    """Averages one bucket of gradients over all processes; one object serves all buckets."""

    def __init__(self, traffic: Traffic, stopwatch: Stopwatch, device: torch.device) -> None:
        self._traffic, self._stopwatch, self._device = traffic, stopwatch, device
        self._world_size = dist.get_world_size()

    @abc.abstractmethod
    def average(self, bucket: GradBucket) -> Future[Tensor]:
        """Put the average over all processes into the bucket's buffer."""

    def rescale(self, scale: float) -> None:  # noqa: B027  only error feedback depends on it
        """Note that the losses of this step, and so their gradients, are multiplied by `scale`."""

    def state(self) -> dict[str, Tensor]:
        return {}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:  # noqa: B027  only error feedback has a state
        """Take back what `state` returned; without tensors compression starts afresh."""

    def _count_bytes(self, tensor: Tensor) -> Tensor:
        """Return the tensor, after adding its bytes to the traffic."""
        self._traffic.sent_bytes += tensor.nbytes
        return tensor


def make_compressor(config: Train, traffic: Traffic, stopwatch: Stopwatch, device: torch.device) -> Compressor:
    if config.compress_kind == "topk":
        return TopKCompressor(traffic, stopwatch, device, config.topk_fraction)
    if config.compress_kind == "powersgd":
        return PowerSGDCompressor(traffic, stopwatch, device, config.powersgd_rank)
    if config.compress_kind == "fp16":
        return Float16Compressor(traffic, stopwatch, device)
    return BFloat16Compressor(traffic, stopwatch, device)


def compression_hook(compressor: Compressor, bucket: GradBucket) -> Future[Tensor]:
    """Run the compressor; DistributedDataParallel wants a plain function with an argument named `bucket`."""
    return compressor.average(bucket)


class BFloat16Compressor(Compressor):
    """Half the bytes and the range of fp32, so nothing overflows that did not before."""

    def average(self, bucket: GradBucket) -> Future[Tensor]:
        self._traffic.sent_bytes += bucket.buffer().numel() * torch.bfloat16.itemsize
        return bf16_compress_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _BegunBucket:
    """A bucket whose largest number is being agreed on; its `future` will have the average."""

    index: int
    buffer: Tensor
    largest: Tensor
    agreement: dist.Work
    future: Future[Tensor]


class Float16Compressor(Compressor):
    """Half the bytes, and three more bits of precision than bf16.

    Every bucket is first scaled by a power of two, so that its largest number lies just below 2¹⁵. A collective of
    four bytes finds that number for all processes, while the gradients of the next bucket are computed: a bucket is
    sent when the next one is ready. Casting without it and repeating in fp32 what overflowed would save these bytes,
    but gradients below 6e-8 would vanish unnoticed.
    """

    def __init__(self, traffic: Traffic, stopwatch: Stopwatch, device: torch.device) -> None:
        super().__init__(traffic, stopwatch, device)
        self._factors: dict[int, Tensor] = {}  # kept until the next step: on a GPU the callback runs on another stream
        self._begun: _BegunBucket | None = None

    def average(self, bucket: GradBucket) -> Future[Tensor]:
        buffer = bucket.buffer()
        largest = torch.linalg.vector_norm(buffer, math.inf).float().nan_to_num(nan=math.inf)
        agreement = dist.all_reduce(self._count_bytes(largest), dist.ReduceOp.MAX, async_op=True)
        assert agreement is not None  # it is asynchronous
        future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else [])
        previous, self._begun = self._begun, _BegunBucket(bucket.index(), buffer, largest, agreement, future)
        # In the order of the buckets, and never from a callback: every process must begin its collectives alike.
        if previous is not None:
            self._send(previous)
        if bucket.is_last():
            self._send(self._begun)
            self._begun = None
        return future

    def _send(self, bucket: _BegunBucket) -> None:
        with self._stopwatch.waiting():
            bucket.agreement.wait()
        factor = self._factors[bucket.index] = power_of_two_below(bucket.largest)
        compressed = self._count_bytes((bucket.buffer * (factor / self._world_size)).half())

        def decompress(future: Future[list[Tensor]]) -> None:
            try:
                bucket.buffer.copy_(future.value()[0])
            except RuntimeError as error:  # another process is lost
                bucket.future.set_exception(error)  # type: ignore[arg-type]  # typed as if it were a result
            else:
                bucket.future.set_result(bucket.buffer.div_(factor))

        work = dist.all_reduce(compressed, async_op=True)
        assert work is not None  # it is asynchronous
        future: Future[list[Tensor]] = work.get_future()
        future.then(decompress)


def power_of_two_below(largest: Tensor, exponent_limit: int = 15) -> Tensor:
    """Return the factor that brings `largest` just below 2^limit; 1 if it is not finite, so that all see that."""
    _, exponent = torch.frexp(largest.clamp(min=2.0**-100))
    return torch.where(largest.isfinite(), torch.ldexp(torch.ones_like(largest), exponent_limit - exponent), 1.0)


class ErrorFeedbackCompressor(Compressor):
    """Lossy compression with error feedback: the remainder of one step is added to the gradient of the next.

    All rounds of one bucket are done before the hook returns. Rounds that start in callbacks get mixed up with those
    of other buckets on gloo, and abort the process.
    """

    def __init__(self, traffic: Traffic, stopwatch: Stopwatch, device: torch.device) -> None:
        super().__init__(traffic, stopwatch, device)
        self._remainders: dict[int, Tensor] = {}  # by bucket
        self._scale = 1.0  # the loss scale of the remainders

    def average(self, bucket: GradBucket) -> Future[Tensor]:
        buffer, index = bucket.buffer(), bucket.index()
        previous = self._remainders.get(index)
        if previous is None:
            previous = torch.zeros_like(buffer)
        buffer.add_(previous)
        remainder = self._approximate(bucket)
        finite = buffer.sum().isfinite()  # of the average, so all processes find the same
        # After an overflow (fp16) the optimizer makes no step, so the remainders stay as they were.
        self._remainders[index] = torch.where(finite, remainder, previous)
        self._keep_for_next_step(index, finite)
        future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else [])
        future.set_result(buffer)
        return future

    @abc.abstractmethod
    def _approximate(self, bucket: GradBucket) -> Tensor:
        """Put the average of what was sent into the bucket's buffer; return what this process did not send."""

    def _keep_for_next_step(self, index: int, finite: Tensor) -> None:
        """Keep what the next step needs from this bucket's exchange, unless the average is not finite."""

    def rescale(self, scale: float) -> None:
        for remainder in self._remainders.values():
            remainder.mul_(scale / self._scale)
        self._scale = scale

    def state(self) -> dict[str, Tensor]:
        return {**_add_prefix("left", self._remainders), "scale": torch.tensor(self._scale, dtype=torch.float64)}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        self._remainders = _by_bucket("left", tensors, self._device)
        self._scale = float(tensors.get("scale", 1.0))


class TopKCompressor(ErrorFeedbackCompressor):
    """The largest entries of each bucket, sent as positions and values."""

    def __init__(self, traffic: Traffic, stopwatch: Stopwatch, device: torch.device, fraction: float) -> None:
        super().__init__(traffic, stopwatch, device)
        self._fraction = fraction

    def _approximate(self, bucket: GradBucket) -> Tensor:
        buffer = bucket.buffer()
        count = math.ceil(self._fraction * buffer.numel())
        largest = torch.topk(buffer.abs(), count, sorted=False).indices  # NaN counts as largest
        values = buffer[largest].float()
        remainder = buffer.clone()
        remainder[largest] -= values.to(buffer.dtype)
        positions = largest.to(torch.int32 if buffer.numel() < 1 << 31 else torch.int64)
        message = self._count_bytes(torch.cat([positions.view(torch.int32), values.view(torch.int32)]))
        received = [torch.empty_like(message) for _ in range(self._world_size)]
        with self._stopwatch.waiting():
            dist.all_gather(received, message)
        buffer.zero_()
        for other in received:  # by rank, so that the sums have the same bits on all processes
            where, what = other[:-count].view(positions.dtype), other[-count:].view(torch.float32)
            buffer.index_add_(0, where, what.to(buffer.dtype) / self._world_size)
        return remainder


class PowerSGDCompressor(ErrorFeedbackCompressor):
    """PowerSGD: each gradient matrix as the product of two thin ones, found by one power iteration per step.

    torch's hook needs a single bucket and three rounds; here the first round carries the small gradients as well.
    """

    def __init__(self, traffic: Traffic, stopwatch: Stopwatch, device: torch.device, rank: int) -> None:
        super().__init__(traffic, stopwatch, device)
        self._rank = rank
        self._bases: dict[int, Tensor] = {}  # by bucket: the right factors of all its matrices, one after another
        self._next_bases: dict[int, Tensor] = {}

    def _approximate(self, bucket: GradBucket) -> Tensor:
        buffer = bucket.buffer()
        original = buffer.clone()
        matrices = [gradient.flatten(1) for gradient in bucket.gradients() if is_worth_factoring(gradient, self._rank)]
        small_gradients = [gradient for gradient in bucket.gradients() if not is_worth_factoring(gradient, self._rank)]
        bases = self._split_bases(bucket.index(), matrices)
        left_factors = [matrix.float() @ torch.linalg.qr(base).Q for matrix, base in zip(matrices, bases, strict=True)]
        averages = self._average_together([*left_factors, *small_gradients])
        left_factors = [torch.linalg.qr(factor).Q for factor in averages[: len(left_factors)]]
        right_factors = [matrix.float().T @ factor for matrix, factor in zip(matrices, left_factors, strict=True)]
        _multiply(left_factors, right_factors, matrices)
        remainder = original.sub_(buffer)  # zero for the small gradients, which are sent whole
        right_factors = self._average_together(right_factors)
        _multiply(left_factors, right_factors, matrices)
        for gradient, average in zip(small_gradients, averages[len(left_factors) :], strict=True):
            gradient.copy_(average)
        flat = torch.cat([factor.flatten() for factor in right_factors]) if right_factors else buffer.new_empty(0)
        self._next_bases[bucket.index()] = flat
        return remainder

    def _keep_for_next_step(self, index: int, finite: Tensor) -> None:
        self._bases[index] = torch.where(finite, self._next_bases.pop(index), self._bases[index])

    def state(self) -> dict[str, Tensor]:
        return {**super().state(), **_add_prefix("bases", self._bases)}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        super().restore(tensors)
        self._bases = _by_bucket("bases", tensors, self._device)

    def _split_bases(self, index: int, matrices: Sequence[Tensor]) -> list[Tensor]:
        sizes = [matrix.shape[1] * min(*matrix.shape, self._rank) for matrix in matrices]
        if index not in self._bases:
            generator = torch.Generator().manual_seed(index)  # the same numbers on every process
            self._bases[index] = torch.randn(sum(sizes), generator=generator).to(self._device)
        bases = torch.split(self._bases[index], sizes)
        return [base.view(matrix.shape[1], -1) for base, matrix in zip(bases, matrices, strict=True)]

    def _average_together(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Average the tensors over the processes in one message."""
        if not tensors:
            return []
        flat = torch.cat([tensor.flatten() for tensor in tensors]).div_(self._world_size)
        with self._stopwatch.waiting():
            dist.all_reduce(self._count_bytes(flat))
        averages = torch.split(flat, [tensor.numel() for tensor in tensors])
        return [average.view_as(tensor) for average, tensor in zip(averages, tensors, strict=True)]


def is_worth_factoring(gradient: Tensor, rank: int) -> bool:
    """Return whether two thin factors have less than half the numbers of the matrix."""
    if gradient.ndim < 2:
        return False
    rows, columns = gradient.flatten(1).shape
    return 2 * min(rows, columns, rank) * (rows + columns) < rows * columns


def _multiply(left: Sequence[Tensor], right: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    for left_factor, right_factor, matrix in zip(left, right, out, strict=True):
        matrix.copy_(left_factor @ right_factor.T)


def _add_prefix(prefix: str, tensors: Mapping[int, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{index}": tensor for index, tensor in tensors.items()}


def _by_bucket(prefix: str, tensors: Mapping[str, Tensor], device: torch.device) -> dict[int, Tensor]:
    return {int(index): tensor.to(device) for index, tensor in strip_prefix(f"{prefix}.", tensors).items()}
