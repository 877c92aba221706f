"""Random weights of a model that is split: each process keeps its own shards, with the bits that the whole model has.

Random numbers follow one another, so every process initializes the whole model. Above some size it gives the memory of
the values back while it does so: of all values in a first build, which leaves the model on the meta device, and of
those that other processes have in a second one, when the model is split.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.system.errors import ConfigError
from pipeline.system.torch_private import TorchDispatchMode, tree_leaves
from train.pretrained.materialize import BuildModel, Materializer, full_box
from train.pretrained.source import Box, Entry, Placeholder, Read, Source
from train.process_group import ProcessGroup

RESIDENT_BYTES = 256 << 20  # of values that no process needs, before their memory is given back
_MADV_DONTNEED = 4
_PAST_DISPATCH = ("numpy", "tolist")  # methods of tensors that read values without an operation


def create_split(
    build: BuildModel,
    seed: Callable[[], None],
    group: ProcessGroup,
    resumes: bool,
    resident_bytes: int = RESIDENT_BYTES,
) -> tuple[nn.Module, Materializer | None]:
    """Build a model that will be split; a large one gets its weights then, or from a checkpoint where it resumes."""
    with SparseBuild({}, resident_bytes) as first:
        model = build()
    if not first.dropped:
        return model, None
    if first.problem:
        if group.rank.first:
            print(f"each process initializes the whole model in memory: {first.problem} reads weights", flush=True)
        seed()
        return build(), None
    parameters = list(model.named_parameters(remove_duplicate=False))
    positions = {name: first.positions[id(p)] for name, p in parameters if id(p) in first.positions}
    _move_to_meta(model)
    sources: dict[str, Source] = {name: Placeholder(tuple(p.shape)) for name, p in parameters}
    if resumes:
        return model, Materializer(sources)
    return model, RandomWeights(sources, build, seed, positions, resident_bytes)


def _move_to_meta(model: nn.Module) -> None:
    moved: dict[int, nn.Parameter] = {}  # tied weights stay one parameter
    for module in model.modules():
        for name, old in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(old) not in moved:
                moved[id(old)] = nn.Parameter(torch.empty_like(old, device="meta"), requires_grad=old.requires_grad)
            setattr(module, name, moved[id(old)])


class RandomWeights(Materializer):
    """Initializes the shards of a model that was split; passes before that have placeholders."""

    def __init__(
        self,
        placeholders: Mapping[str, Source],
        build: BuildModel,
        seed: Callable[[], None],
        positions: Mapping[str, int],
        resident_bytes: int,
    ) -> None:
        super().__init__(placeholders)
        self._build, self._seed, self._positions, self._resident_bytes = build, seed, positions, resident_bytes

    def materialize(self, model: nn.Module, device: torch.device, prefix: str = "") -> None:
        boxes = self.boxes(model)
        self._seed()
        kept: dict[int, Box] = {}
        for name, box in boxes.items():
            if (position := self._positions.get(name)) is not None:  # a tied weight may be split in two ways
                kept[position] = box if kept.get(position, box) == box else full_box(self._sources[name].shape)
        with SparseBuild(kept, self._resident_bytes) as second:
            weights = dict(self._build().named_parameters(remove_duplicate=False))
        shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        if second.problem or any(shapes.get(name) != self._sources[name].shape for name in boxes):
            raise ConfigError("model(): builds another model the second time; it must build the same one every time")
        shards = {id(weight): _Shard(weight.detach()) for weight in weights.values()}
        self._sources = {name: shards[id(weights[name])] for name in boxes}
        weights.clear()
        shards.clear()
        del second  # which keeps all parameters
        super().materialize(model, device, prefix)
        self._sources = {}


class _Shard:
    """A weight with the values that this process needs; its memory is freed when they are read, which is once."""

    entries: Sequence[Entry] = ()

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor
        self.shape = tuple(tensor.shape)

    def fill(self, box: Box, out: Tensor, read: Read) -> None:  # noqa: ARG002
        assert self._tensor is not None
        out.copy_(self._tensor[tuple(slice(*side) for side in box)])
        _give_back(self._tensor, None)  # the allocator may keep it
        self._tensor = None


class SparseBuild(TorchDispatchMode):
    """Within this context parameters lose the values outside of `boxes`, named by their order of registration.

    Later operations draw the same random numbers as for whole parameters. One that reads lost values, as a copy does,
    is a `problem`: the model must be built in another way.
    """

    def __init__(self, boxes: Mapping[int, Box], resident_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._boxes, self._resident_bytes = boxes, resident_bytes
        self.positions: dict[int, int] = {}  # by the id of the parameter
        self._alive: list[nn.Parameter] = []  # so that no id is used twice
        self._by_address: dict[int, nn.Parameter] = {}
        self._written: dict[int, nn.Parameter] = {}  # by address, since memory was given back
        self.dropped: set[int] = set()
        self.problem = ""

    def __enter__(self) -> Self:
        self._register, self._copy = nn.Module.register_parameter, nn.Parameter.__deepcopy__

        def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            self._register(module, name, parameter)
            self._add(parameter)

        def deepcopy(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
            duplicate: nn.Parameter = self._copy(parameter, memo)  # type: ignore[no-untyped-call]
            self._add(duplicate)
            return duplicate

        for name in _PAST_DISPATCH:
            setattr(Tensor, name, self._reader(name))
        nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
        nn.Parameter.__deepcopy__ = deepcopy  # type: ignore[method-assign,assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for name in _PAST_DISPATCH:
            delattr(Tensor, name)
        nn.Module.register_parameter = self._register  # type: ignore[method-assign]
        nn.Parameter.__deepcopy__ = self._copy  # type: ignore[method-assign]
        if self.dropped:
            self._drop({})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written, name = 0, func.name().partition(".")[0]
        for tensor in tree_leaves((args, kwargs)):
            if not isinstance(tensor, Tensor) or (address := _address(tensor)) not in self._by_address:
                continue
            if tensor is args[0] and name.endswith("_"):
                written = address
                if _overwrites(func, name) and tensor.nbytes == self._by_address[address].nbytes:
                    self.dropped.discard(address)  # it has values again
            if address in self.dropped and _reads_other_places(func, name, address == written):
                self.problem = self.problem or str(func)
        result = func(*args, **(kwargs or {}))
        if written:
            self._write(written)
        return result

    def _reader(self, name: str) -> Callable[..., Any]:
        read: Callable[..., Any] = getattr(Tensor, name)

        def reads(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if _address(tensor) in self._by_address:
                self.problem = self.problem or f"Tensor.{name}()"
            return read(tensor, *args, **kwargs)

        return reads

    def _add(self, parameter: nn.Parameter | None) -> None:
        if parameter is None or id(parameter) in self.positions or not (address := _address(parameter)):
            return
        other = self._by_address.get(address)
        if other is not None and _address(other) == address:
            self.problem = self.problem or "a second parameter with the same memory"
        self.positions[id(parameter)] = len(self._alive)
        self._alive.append(parameter)
        self._by_address[address] = parameter
        self.dropped.discard(address)
        self._write(address)

    def _write(self, address: int) -> None:
        self._written[address] = self._by_address[address]
        if sum(parameter.nbytes for parameter in self._written.values()) > self._resident_bytes:
            self._drop({address: self._written.pop(address)})  # which may not be complete

    def _drop(self, spared: dict[int, nn.Parameter]) -> None:
        """Lose values that are not kept, but those of the spared parameter."""
        for address, parameter in self._written.items():
            if _give_back(parameter, self._boxes.get(self.positions[id(parameter)])):
                self.dropped.add(address)
        self._written = spared


_LIBC = ctypes.CDLL(None)


def _give_back(tensor: Tensor, box: Box | None) -> bool:
    """Give the pages outside of a box back to the system; return whether values there may be lost."""
    if not tensor.is_contiguous() or tensor.untyped_storage().nbytes() != tensor.nbytes:
        return False
    address, lost = _address(tensor), False
    for start, stop in _gaps(tensor.shape, box, tensor.element_size()):
        lost, first = True, -(-(address + start) // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (address + stop) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if size > 0:
            _LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), _MADV_DONTNEED)
    return lost


def _address(tensor: Tensor) -> int:
    """Return where a tensor's memory begins; 0 where it has none of this machine's."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.device.type != "cpu":
        return 0
    return tensor.untyped_storage().data_ptr()


def _overwrites(func: Any, name: str) -> bool:
    """Return whether an operation in place sets all values, whatever they were."""
    return name in ("aten::fill_", "aten::zero_", "aten::copy_") or torch.Tag.nondeterministic_seeded in func.tags


def _reads_other_places(func: Any, name: str, written: bool) -> bool:
    """Return whether the result at one place needs values of other places; `written`: by the operation, in place."""
    if written and (_overwrites(func, name) or torch.Tag.pointwise in func.tags or name == "aten::index_put_"):
        return False
    return not (func.is_view or name.endswith("_like") or name.startswith("aten::new_"))


def _gaps(shape: Sequence[int], box: Box | None, item_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of bytes of a contiguous tensor that are outside of a box."""
    total = item_bytes * int(np.prod(shape))
    place = 0
    for start, stop in _runs(shape, box, item_bytes):
        if place < start:
            yield place, start
        place = stop
    if place < total:
        yield place, total


def _runs(shape: Sequence[int], box: Box | None, item_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of bytes of a contiguous tensor that are in a box, in order."""
    if not box or any(start == stop for start, stop in box):
        return
    cut = max((axis for axis, side in enumerate(box) if side != (0, shape[axis])), default=0)
    sizes = (
        item_bytes * np.cumprod([1, *reversed(shape)])[::-1]
    )  # of one step along each axis, from the second entry on
    starts = np.zeros(1, np.int64)
    for axis, (start, stop) in enumerate(box[: cut + 1]):
        steps = [start] if axis == cut else range(start, stop)
        starts = (starts[:, None] + np.asarray(steps) * sizes[axis + 1]).ravel()
    width = (box[cut][1] - box[cut][0]) * sizes[cut + 1]
    for start in starts.tolist():
        yield start, start + int(width)
