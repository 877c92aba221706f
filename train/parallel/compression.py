"""What gradients are packed into for the exchange, and the remainders that packing leaves for the next step.

Data parallel over slow links: gradients are packed before they are exchanged.
"""

import abc
import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from pipeline.contract.settings.stages import Train
from train.parallel.base import Part, Stopwatch, Traffic
from train.parallel.ddp import DataParallel


def make_packing(config: Train, traffic: Traffic, stopwatch: Stopwatch, device: torch.device) -> "Packing":
    if config.compress == "topk":
        return TopK(traffic, stopwatch, device, config.compress_share)
    if config.compress == "powersgd":
        return LowRank(traffic, stopwatch, device, config.compress_rank)
    return Float16(traffic, stopwatch, device) if config.compress == "fp16" else BFloat16(traffic, stopwatch, device)


class Packing(abc.ABC):
    """How the processes average one bucket of gradients; one object serves all buckets."""

    def __init__(self, traffic: Traffic, stopwatch: Stopwatch, device: torch.device) -> None:
        self._traffic, self._stopwatch, self._device = traffic, stopwatch, device
        self._world_size = dist.get_world_size()

    @abc.abstractmethod
    def exchange(self, bucket: GradBucket) -> Future[Tensor]:
        """Put the average over all processes into the bucket's buffer."""

    def rescale(self, scale: float) -> None:  # noqa: B027  only feedback depends on it
        """The losses of this step are multiplied by `scale`, and so are their gradients."""

    def state(self) -> dict[str, Tensor]:
        return {}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:  # noqa: B027  only feedback has a state
        """`tensors` is what `state` gave, or empty: then packing starts afresh."""

    def _send(self, tensor: Tensor) -> Tensor:
        self._traffic.sent_bytes += tensor.numel() * tensor.element_size()
        return tensor


def pack(packing: Packing, bucket: GradBucket) -> Future[Tensor]:
    """The hook itself: it must be a plain function, with an argument of this name."""
    return packing.exchange(bucket)


class BFloat16(Packing):
    """Half the bytes; the range of fp32, so nothing can overflow that did not before."""

    def exchange(self, bucket: GradBucket) -> Future[Tensor]:
        buffer = bucket.buffer()
        packed = self._send((buffer / self._world_size).bfloat16())

        def unpack(done: Future[list[Tensor]]) -> Tensor:
            buffer.copy_(done.value()[0])
            return buffer

        return _future(dist.all_reduce(packed, async_op=True)).then(unpack)


class Float16(Packing):
    """Half the bytes, and three bits more of each number than bf16.

    Every bucket is first scaled by a power of two, so that its largest number lies just below 2¹⁵. All processes
    learn that number beforehand, by a collective of four bytes. Packing as it comes and repeating in fp32 what
    overflowed would spare it, but gradients below 6e-8 would vanish unseen, and a repetition that starts in a
    callback can meet another bucket's exchange on another process: gloo would add up the wrong buffers.
    """

    def __init__(self, traffic: Traffic, stopwatch: Stopwatch, device: torch.device) -> None:
        super().__init__(traffic, stopwatch, device)
        self._factors: dict[int, Tensor] = {}  # alive until the next step: on a GPU the callback runs elsewhere

    def exchange(self, bucket: GradBucket) -> Future[Tensor]:
        buffer = bucket.buffer()
        largest = torch.linalg.vector_norm(buffer, math.inf).float().nan_to_num(nan=math.inf)
        with self._stopwatch.waiting():
            dist.all_reduce(self._send(largest), dist.ReduceOp.MAX)
        factor = self._factors[bucket.index()] = power_of_two_below(largest)
        packed = self._send((buffer * (factor / self._world_size)).half())

        def unpack(done: Future[list[Tensor]]) -> Tensor:
            buffer.copy_(done.value()[0])
            return buffer.div_(factor)

        return _future(dist.all_reduce(packed, async_op=True)).then(unpack)


def power_of_two_below(largest: Tensor, top: int = 15) -> Tensor:
    """What brings `largest` just below 2^top; 1 where it is not finite: everybody shall see that it is not."""
    _, exponent = torch.frexp(largest.clamp(min=2.0**-100))
    return torch.where(largest.isfinite(), torch.ldexp(torch.ones_like(largest), top - exponent), 1.0)


class Feedback(Packing):
    """Lossy packing: what was not sent is added to the gradient of the next step (error feedback).

    The rounds of one bucket are done before the hook returns. Rounds that start in callbacks are mixed up with
    those of other buckets on gloo, and abort the process.
    """

    def __init__(self, traffic: Traffic, stopwatch: Stopwatch, device: torch.device) -> None:
        super().__init__(traffic, stopwatch, device)
        self._left: dict[int, Tensor] = {}  # by bucket
        self._scale = 1.0  # what the remainders are multiplied by, as the gradients of their step were

    def exchange(self, bucket: GradBucket) -> Future[Tensor]:
        buffer, index = bucket.buffer(), bucket.index()
        before = self._left.get(index)
        if before is None:
            before = torch.zeros_like(buffer)
        buffer.add_(before)
        left = self._approximate(bucket)
        finite = buffer.sum().isfinite()  # of the average, so all processes find the same
        # After an overflow (fp16) no step is made, so it leaves the remainders as they were.
        self._left[index] = torch.where(finite, left, before)
        self._learn(index, finite)
        done: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else [])
        done.set_result(buffer)
        return done

    @abc.abstractmethod
    def _approximate(self, bucket: GradBucket) -> Tensor:
        """Put the average of what can be sent into the bucket's buffer; return what this process could not send."""

    def _learn(self, index: int, finite: Tensor) -> None:
        """Take what the exchange of this bucket found over to the next step, unless it is not finite."""

    def rescale(self, scale: float) -> None:
        for left in self._left.values():
            left.mul_(scale / self._scale)
        self._scale = scale

    def state(self) -> dict[str, Tensor]:
        return {**_named("left", self._left), "scale": torch.tensor(self._scale, dtype=torch.float64)}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        self._left = _of_buckets("left", tensors, self._device)
        self._scale = float(tensors.get("scale", 1.0))


class TopK(Feedback):
    """The largest entries of each bucket, as positions and values."""

    def __init__(self, traffic: Traffic, stopwatch: Stopwatch, device: torch.device, share: float) -> None:
        super().__init__(traffic, stopwatch, device)
        self._share = share

    def _approximate(self, bucket: GradBucket) -> Tensor:
        buffer = bucket.buffer()
        count = math.ceil(self._share * buffer.numel())
        chosen = torch.topk(buffer.abs(), count, sorted=False).indices  # what is not a number counts as largest
        values = buffer[chosen].float()
        left = buffer.clone()
        left[chosen] -= values.to(buffer.dtype)
        positions = chosen.to(torch.int32 if buffer.numel() < 1 << 31 else torch.int64)
        packed = self._send(torch.cat([positions.view(torch.int32), values.view(torch.int32)]))  # one message
        received = [torch.empty_like(packed) for _ in range(self._world_size)]
        with self._stopwatch.waiting():
            dist.all_gather(received, packed)
        buffer.zero_()
        for part in received:  # by rank, so that everybody's sums have the same bits
            where, what = part[:-count].view(positions.dtype), part[-count:].view(torch.float32)
            buffer.index_add_(0, where, what.to(buffer.dtype) / self._world_size)
        return left


class LowRank(Feedback):
    """PowerSGD: each matrix of gradients as the product of two thin ones, found by one power iteration a step.

    The library's own needs one bucket and three rounds; here the first round carries small gradients as well.
    """

    def __init__(self, traffic: Traffic, stopwatch: Stopwatch, device: torch.device, rank: int) -> None:
        super().__init__(traffic, stopwatch, device)
        self._rank = rank
        self._bases: dict[int, Tensor] = {}  # by bucket: the right sides of all its matrices, one after another
        self._found: dict[int, Tensor] = {}

    def _approximate(self, bucket: GradBucket) -> Tensor:
        buffer = bucket.buffer()
        whole = buffer.clone()
        matrices = [gradient.flatten(1) for gradient in bucket.gradients() if shrinks(gradient, self._rank)]
        others = [gradient for gradient in bucket.gradients() if not shrinks(gradient, self._rank)]
        bases = self._bases_of(bucket.index(), matrices)
        left = [matrix.float() @ orthogonal(base) for matrix, base in zip(matrices, bases, strict=True)]
        met = self._average([*left, *others])
        left = [orthogonal(side) for side in met[: len(left)]]
        right = [matrix.float().T @ side for matrix, side in zip(matrices, left, strict=True)]
        _multiply(left, right, matrices)
        rest = whole.sub_(buffer)  # the small gradients are sent as they are
        right = self._average(right)
        _multiply(left, right, matrices)
        for gradient, average in zip(others, met[len(left) :], strict=True):
            gradient.copy_(average)
        self._found[bucket.index()] = torch.cat([side.flatten() for side in right]) if right else buffer.new_empty(0)
        return rest

    def _learn(self, index: int, finite: Tensor) -> None:
        self._bases[index] = torch.where(finite, self._found.pop(index), self._bases[index])

    def state(self) -> dict[str, Tensor]:
        return {**super().state(), **_named("bases", self._bases)}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        super().restore(tensors)
        self._bases = _of_buckets("bases", tensors, self._device)

    def _bases_of(self, index: int, matrices: Sequence[Tensor]) -> list[Tensor]:
        sizes = [matrix.shape[1] * min(*matrix.shape, self._rank) for matrix in matrices]
        if index not in self._bases:
            same = torch.Generator().manual_seed(index)  # on every process
            self._bases[index] = torch.randn(sum(sizes), generator=same).to(self._device)
        parts = torch.split(self._bases[index], sizes)
        return [part.view(matrix.shape[1], -1) for part, matrix in zip(parts, matrices, strict=True)]

    def _average(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """As one message."""
        if not tensors:
            return []
        flat = torch.cat([tensor.flatten() for tensor in tensors]).div_(self._world_size)
        with self._stopwatch.waiting():
            dist.all_reduce(self._send(flat))
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def shrinks(gradient: Tensor, rank: int) -> bool:
    """Whether two thin matrices are less than half of this one."""
    if gradient.ndim < 2:
        return False
    rows, columns = gradient.flatten(1).shape
    return 2 * min(rows, columns, rank) * (rows + columns) < rows * columns


def orthogonal(columns: Tensor) -> Tensor:
    found: Tensor = torch.linalg.qr(columns).Q
    return found


def _multiply(left: Sequence[Tensor], right: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    for one, other, matrix in zip(left, right, into, strict=True):
        matrix.copy_(one @ other.T)


def _named(what: str, tensors: Mapping[int, Tensor]) -> dict[str, Tensor]:
    return {f"{what}.{index}": tensor for index, tensor in tensors.items()}


def _of_buckets(what: str, tensors: Mapping[str, Tensor], device: torch.device) -> dict[int, Tensor]:
    held = {name.removeprefix(f"{what}."): tensor for name, tensor in tensors.items() if name.startswith(f"{what}.")}
    return {int(index): tensor.to(device) for index, tensor in held.items()}


def _future(work: dist.Work | None) -> Future[list[Tensor]]:
    assert work is not None  # it is asynchronous
    future: Future[list[Tensor]] = work.get_future()
    return future


class CompressedDataParallel(DataParallel):
    def warm_up(self, parts: Callable[[], Iterable[Part]]) -> None:
        """Packing begins when the buckets have their lasting order: remainders are kept by bucket."""
        self._packing = make_packing(self.config, self.traffic, self.stopwatch, self.group.device)
        super().warm_up(parts)
        self.ddp.register_comm_hook(self._packing, pack)

    def exchange(self, last: bool) -> contextlib.AbstractContextManager[object]:
        if not last:
            return self.ddp.no_sync()
        self._packing.rescale(self.objective.precision.scaler.get_scale())
        return contextlib.nullcontext()

    def own_state(self) -> Mapping[str, Tensor]:
        return self._packing.state()

    def restore_own(self, tensors: Mapping[str, Tensor]) -> None:
        self._packing.restore(tensors)
