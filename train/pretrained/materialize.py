"""Materializing pretrained weights: a model is built on the meta device, then each process reads its own shards.

`MetaModel` builds the model without memory for its parameters. `Materializer` allocates them and reads their values
from safetensors files, of a distributed tensor only the shard that this process has.
"""

from __future__ import annotations

import contextlib
import math
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from pipeline.system.errors import ConfigError, DataError
from pipeline.system.torch_private import local_box, parse_to
from train.checkpoint.format import DTYPES
from train.pretrained.source import Box, Entry, Source
from train.state import local_shard

BuildModel = Callable[[], nn.Module]


class MetaModel:
    """A model whose parameters are on the meta device; buffers are computed, as no file has rotary frequencies."""

    def __init__(self, build: BuildModel) -> None:
        self._build, self._kept = build, range(0)
        try:
            with _MetaRegistration(()) as self._registration:
                self.model = build()
            computes = any(buffer.is_meta for buffer in self.model.buffers())  # such as zeros_like(self.weight)
        except RuntimeError:
            computes = True
        if computes:  # with its weights while it is built
            self._kept = range(sys.maxsize)
            with _MetaRegistration(self._kept) as self._registration:
                self.model = build()
            self._registration.release(self.model)

    def initialize(self, names: Collection[str], seed: Callable[[], None]) -> dict[str, nn.Parameter]:
        """Return these parameters as the task initializes them.

        The model is built once more, and only the parameters registered in the same positions get memory; all others
        draw no random numbers.
        """
        expected = {name: self.model.get_parameter(name) for name in names}
        positions = {name: self._registration.positions.get(id(parameter)) for name, parameter in expected.items()}
        if unregistered := [name for name, position in positions.items() if position is None]:
            raise ConfigError(
                f"adapt(): {unregistered[0]} is not set as a parameter of a module; write module.name = Parameter"
            )
        seed()
        kept = self._kept or {position for position in positions.values() if position is not None}
        with _MetaRegistration(kept), _IgnoreMeta():
            second_model = self._build()
        initialized = {name: second_model.get_parameter(name) for name in names}
        if changed := [n for n, new in initialized.items() if new.is_meta or new.shape != expected[n].shape]:
            raise ConfigError(
                f"adapt(): builds {changed[0]} differently each time, or from weights that are not read yet; "
                "it must build the same model every time, and initialize new weights by itself"
            )
        return initialized


class _IgnoreMeta(TorchFunctionMode):
    """Makes moves to the meta device do nothing: adapters move to the device of the layer they wrap."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.to and not args[0].is_meta:
            device, dtype = parse_to(*args[1:], **(kwargs or {}))
            if device is not None and device.type == "meta":
                return args[0] if dtype is None else args[0].to(dtype)
        return func(*args, **(kwargs or {}))


class _MetaRegistration:
    """Within this context a parameter moves to the meta device when a module registers it, before it is initialized.

    Parameters are numbered in the order of registration, and a copy has the number of its original. Those in the
    positions `kept` keep their memory.
    """

    def __init__(self, kept_positions: Collection[int]) -> None:
        self._kept, self._count = kept_positions, 0
        self._alive: list[nn.Parameter] = []  # so that no id is used twice
        self._replaced: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}  # by the id of the original
        self.positions: dict[int, int] = {}

    def __enter__(self) -> Self:
        self._register, self._copy = nn.Module.register_parameter, nn.Parameter.__deepcopy__
        registration = self

        def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            registration._register(module, name, None if parameter is None else registration._replace(parameter))

        def deepcopy(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
            duplicate: nn.Parameter = registration._copy(parameter, memo)  # type: ignore[no-untyped-call]
            if id(parameter) in registration.positions:
                registration._number(duplicate, registration.positions[id(parameter)])
            return duplicate

        nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
        nn.Parameter.__deepcopy__ = deepcopy  # type: ignore[method-assign,assignment]
        return self

    def __exit__(self, *_: object) -> None:
        nn.Module.register_parameter = self._register  # type: ignore[method-assign]
        nn.Parameter.__deepcopy__ = self._copy  # type: ignore[method-assign]

    def _replace(self, parameter: nn.Parameter) -> nn.Parameter:
        if id(parameter) in self.positions:
            return parameter
        original, replacement = self._replaced.get(id(parameter), (None, parameter))
        if original is None or original() is not parameter:  # the id may be that of a freed parameter
            replacement = parameter
            if self._count not in self._kept and not parameter.is_meta:
                meta = torch.empty_like(parameter, device="meta")
                replacement = nn.Parameter(meta, requires_grad=parameter.requires_grad)
                self._replaced[id(parameter)] = weakref.ref(parameter), replacement
            self._number(replacement, self._count)
            self._count += 1
        return replacement

    def release(self, model: nn.Module) -> None:
        """Move the parameters that were kept to the meta device."""
        positions, self.positions, self._alive = self.positions, {}, []
        released: dict[int, nn.Parameter] = {}  # tied weights stay one parameter
        for module in model.modules():
            for name, kept in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                if id(kept) not in released:
                    released[id(kept)] = nn.Parameter(torch.empty_like(kept, device="meta"), kept.requires_grad)
                    if id(kept) in positions:
                        self._number(released[id(kept)], positions[id(kept)])
                setattr(module, name, released[id(kept)])

    def _number(self, parameter: nn.Parameter, position: int) -> None:
        self.positions[id(parameter)] = position
        self._alive.append(parameter)


Slot = tuple[nn.Module, str, str]  # a module, its own name of a parameter, and the parameter's name in the whole model


class Materializer:
    """Allocates the parameters of a meta model and reads their values from `sources`, given by parameter name."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources = sources
        self.read = TensorReader()
        self._temporary: dict[int, tuple[str, Tensor]] = {}  # temporary weights on the meta device, by memory address

    def boxes(self, model: nn.Module) -> dict[str, Box]:
        """Return what `materialize` will read of each parameter."""
        return {name: _own_box(getattr(module, own_name)) for module, own_name, name in _meta_slots(model, "", ())}

    def materialize(self, model: nn.Module, device: torch.device, prefix: str = "") -> None:
        """Read all parameters on the meta device, and the buffers that files have.

        `prefix` is the module's name in the whole model, with a dot.
        """
        self._read_weights(model, device, prefix)

    @torch.no_grad()
    def _read_weights(
        self, model: nn.Module, device: torch.device, prefix: str = "", skip: Collection[int] = ()
    ) -> None:
        """`skip` are ids of modules to leave out."""
        materialized: dict[int, nn.Parameter] = {}  # tied weights stay one parameter
        for module, own_name, name in _meta_slots(model, prefix, skip):
            meta = getattr(module, own_name)
            if id(meta) not in materialized:
                tensor = self._read_shard(name, meta, device)
                materialized[id(meta)] = nn.Parameter(tensor, requires_grad=meta.requires_grad)
            setattr(module, own_name, materialized[id(meta)])
        for name, buffer in model.named_buffers(prefix.removesuffix(".")):
            if (source := self._sources.get(name)) is not None:
                source.fill(full_box(buffer.shape), buffer, self.read)

    @contextlib.contextmanager
    def materialize_temporarily(
        self, module: nn.Module, device: torch.device, prefix: str = "", skip: Collection[int] = ()
    ) -> Iterator[None]:
        """Materialize a module within the context, and free its weights at the end."""
        slots = list(_meta_slots(module, prefix, skip))
        meta_parameters = [getattr(owner, own_name) for owner, own_name, _ in slots]
        self._read_weights(module, device, prefix, skip)
        storages = [local_shard(getattr(owner, own_name)).untyped_storage() for owner, own_name, _ in slots]
        for storage, (*_, name), meta in zip(storages, slots, meta_parameters, strict=True):
            self._temporary[storage.data_ptr()] = name, meta
        try:
            yield
        finally:
            for (owner, own_name, _), meta in zip(slots, meta_parameters, strict=True):
                setattr(owner, own_name, meta)
            for storage in storages:
                self._temporary.pop(storage.data_ptr(), None)
                storage.resize_(0)  # an autograd graph may keep the tensor, but not its memory

    def reread_for_backward(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """Return a context for passes with temporary weights: autograd saves their names and reads them again."""

        def pack(tensor: Tensor) -> Any:
            local = local_shard(tensor.detach())
            if type(local) is not Tensor:  # the result of an exchange, without memory of its own
                return tensor
            if (temporary := self._temporary.get(local.untyped_storage().data_ptr())) is None:
                return tensor
            form = distributed_form(tensor) if isinstance(tensor, DTensor) else None
            return temporary, form, local.size(), local.stride(), local.storage_offset()

        def unpack(saved: Any) -> Tensor:
            if isinstance(saved, Tensor):
                return saved
            (name, meta), form, *view = saved
            local = local_shard(self._read_shard(name, meta, device)).as_strided(*view)
            return DTensor.from_local(local, **form) if form else local

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def _read_shard(self, name: str, meta: Tensor, device: torch.device) -> Tensor:
        source = self._sources[name]
        if tuple(meta.shape) != source.shape:
            raise ConfigError(
                f"parallelize() replaces {name} by a tensor of {list(meta.shape)}; since it gets its "
                "weights later, it must make distributed tensors, as parallelize_module does"
            )
        box = _own_box(meta)
        local = torch.empty([stop - start for start, stop in box], dtype=meta.dtype, device=device)
        if local.numel():
            source.fill(box, local, self.read)
        if not isinstance(meta, DTensor):
            return local
        return DTensor.from_local(local, **distributed_form(meta))


def distributed_form(tensor: DTensor) -> dict[str, Any]:
    """Return the arguments that make a tensor like this one of a shard."""
    form = {"device_mesh": tensor.device_mesh, "placements": tensor.placements}
    return {**form, "shape": tensor.shape, "stride": tensor.stride(), "run_check": False}


def _own_box(meta: Tensor) -> Box:
    """Return which part of a whole parameter this process has."""
    if not isinstance(meta, DTensor):
        return full_box(meta.shape)
    shape, offset = local_box(meta.shape, meta.device_mesh, meta.placements)
    return tuple((start, start + size) for start, size in zip(offset, shape, strict=True))


def _meta_slots(model: nn.Module, prefix: str, skip: Collection[int]) -> Iterator[Slot]:
    for path, module in model.named_modules():
        if id(module) in skip:
            continue
        for own_name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter.is_meta:
                yield module, own_name, f"{prefix}{path}.{own_name}" if path else f"{prefix}{own_name}"


class TensorReader:
    """Reads boxes of tensors from safetensors files, which stay open and memory-mapped as long as this object."""

    def __init__(self) -> None:
        self._open: dict[Path, Any] = {}
        self.bytes = 0  # read so far

    def __call__(self, entry: Entry, box: Box) -> Tensor:
        self.bytes += math.prod(stop - start for start, stop in box) * DTYPES[entry.dtype].itemsize
        try:
            if entry.file not in self._open:
                self._open[entry.file] = safe_open(entry.file, framework="pt")
            file = self._open[entry.file]
            tensor: Tensor = (
                file.get_slice(entry.name)[tuple(slice(*side) for side in box)] if box else file.get_tensor(entry.name)
            )
        except (SafetensorError, OSError) as error:
            raise DataError(f"{entry.file}: {entry.name} cannot be read: {error}") from error
        return tensor


def full_box(shape: torch.Size | tuple[int, ...]) -> Box:
    return tuple((0, size) for size in shape)
