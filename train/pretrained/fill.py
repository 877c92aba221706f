"""Building a model without memory for its parameters, but for the few that no file holds.

Memory and numbers for a model that was built without: of each tensor the piece this process holds.

Boxes of tensors out of safetensors files: what is asked for is read, and counted.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.overrides import TorchFunctionMode

from pipeline.contract.errors import ConfigError, DataError
from train.pretrained.source import BITS, Box, Entry, Source

Make = Callable[[], nn.Module]


class Bare:
    """Buffers are as they were reckoned: rotary frequencies and masks are in no file."""

    def __init__(self, make: Make) -> None:
        self._make = make
        with _Registering(()) as self._registered:
            self.model = make()

    def begun(self, names: Collection[str], seeded: Callable[[], None]) -> dict[str, nn.Parameter]:
        """These parameters as the task begins them; they alone have memory, all the others draw no random numbers.

        The model is built once more, and those are kept that are registered at the same turns.
        """
        wanted = {name: self.model.get_parameter(name) for name in names}
        turns = {name: self._registered.turns.get(id(parameter)) for name, parameter in wanted.items()}
        if untold := [name for name, turn in turns.items() if turn is None]:
            raise ConfigError(
                f"adapt(): {untold[0]} is not set as a parameter of a module; write module.name = Parameter"
            )
        seeded()
        with _Registering({turn for turn in turns.values() if turn is not None}), _Staying():
            again = self._make()
        found = {name: again.get_parameter(name) for name in names}
        if odd := [name for name, new in found.items() if new.is_meta or new.shape != wanted[name].shape]:
            raise ConfigError(
                f"adapt(): builds {odd[0]} in another way each time, or out of weights that are filled in only later; "
                "it must build the same model, and begin what is new by itself"
            )
        return found


class _Staying(TorchFunctionMode):
    """Adapters go to the device of the layer they are put around, which here has none: they stay."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.to and not args[0].is_meta:
            device, dtype, *_ = torch._C._nn._parse_to(*args[1:], **(kwargs or {}))
            if device is not None and device.type == "meta":
                return args[0] if dtype is None else args[0].to(dtype)
        return func(*args, **(kwargs or {}))


class _Registering:
    """While it is entered, parameters lose their memory when a module takes them, before they are filled with numbers.

    Each has the turn at which it was taken, and so has a copy of it; those of the turns that are `kept` stay whole.
    """

    def __init__(self, kept: Collection[int]) -> None:
        self._kept, self._count = kept, 0
        self._alive: list[nn.Parameter] = []  # so that no two have had one id
        self._instead: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}  # by the id of what was handed in
        self.turns: dict[int, int] = {}

    def __enter__(self) -> Self:
        self._register, self._copy = nn.Module.register_parameter, nn.Parameter.__deepcopy__
        registering = self

        def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            registering._register(module, name, None if parameter is None else registering._taken(parameter))

        def copied(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
            made: nn.Parameter = registering._copy(parameter, memo)  # type: ignore[no-untyped-call]
            if id(parameter) in registering.turns:
                registering._note(made, registering.turns[id(parameter)])
            return made

        nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
        nn.Parameter.__deepcopy__ = copied  # type: ignore[method-assign,assignment]
        return self

    def __exit__(self, *_: object) -> None:
        nn.Module.register_parameter = self._register  # type: ignore[method-assign]
        nn.Parameter.__deepcopy__ = self._copy  # type: ignore[method-assign]

    def _taken(self, parameter: nn.Parameter) -> nn.Parameter:
        if id(parameter) in self.turns:
            return parameter
        handed, taken = self._instead.get(id(parameter), (None, parameter))
        if handed is None or handed() is not parameter:  # an id may have belonged to one that is gone
            taken = parameter
            if self._count not in self._kept and not parameter.is_meta:
                bare = torch.empty_like(parameter, device="meta")
                taken = nn.Parameter(bare, requires_grad=parameter.requires_grad)
                self._instead[id(parameter)] = weakref.ref(parameter), taken
            self._note(taken, self._count)
            self._count += 1
        return taken

    def _note(self, parameter: nn.Parameter, turn: int) -> None:
        self.turns[id(parameter)] = turn
        self._alive.append(parameter)


Place = tuple[nn.Module, str, str]  # a module, what it calls a parameter, and the parameter's name in the whole model


class Filling:
    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources = sources
        self._read = Reading()
        self._lent: dict[int, str] = {}  # what is lent now, by where it lies

    @property
    def bytes_read(self) -> int:
        return self._read.bytes

    @torch.no_grad()
    def fill(self, model: nn.Module, device: torch.device, prefix: str = "", skip: Collection[int] = ()) -> None:
        """Everything that has no memory, and the buffers that files hold; `prefix` is where the module stands.

        Modules are skipped by their id().
        """
        made: dict[int, nn.Parameter] = {}  # tied weights stay one
        for module, own, name in _without_memory(model, prefix, skip):
            old = module._parameters[own]
            assert old is not None
            if id(old) not in made:
                made[id(old)] = nn.Parameter(self._piece(name, old, device), requires_grad=old.requires_grad)
            module._parameters[own] = made[id(old)]
        for name, buffer in model.named_buffers(prefix.removesuffix(".")):
            if (source := self._sources.get(name)) is not None:
                source.fill(whole(buffer.shape), buffer, self._read)

    @contextlib.contextmanager
    def lend(
        self, module: nn.Module, device: torch.device, prefix: str = "", skip: Collection[int] = ()
    ) -> Iterator[None]:
        """Filled for as long as it is looked at. Autograd notes the names of what was lent, and reads it again."""
        places = list(_without_memory(module, prefix, skip))
        before = [holder._parameters[own] for holder, own, _ in places]
        self.fill(module, device, prefix, skip)
        given = [(name, _memory(holder._parameters[own])) for holder, own, name in places]
        self._lent |= {storage.data_ptr(): name for name, storage in given}
        try:
            yield
        finally:
            for (holder, own, _), old in zip(places, before, strict=True):
                holder._parameters[own] = old
            for _, storage in given:
                self._lent.pop(storage.data_ptr(), None)
                storage.resize_(0)  # a graph may hold the tensor for longer, and now holds nothing

    def remembering(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """Around passes whose graph outlives what was lent for them."""

        def pack(tensor: Tensor) -> Any:
            name = self._lent.get(tensor.untyped_storage().data_ptr())
            if name is None:
                return tensor
            return name, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()

        def unpack(kept: Any) -> Tensor:
            if isinstance(kept, Tensor):
                return kept
            name, dtype, *view = kept
            wanted = torch.empty(self._sources[name].shape, dtype=dtype, device="meta")
            return self._piece(name, wanted, device).as_strided(*view)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def _piece(self, name: str, wanted: Tensor, device: torch.device) -> Tensor:
        source = self._sources[name]
        if tuple(wanted.shape) != source.shape:
            raise ConfigError(
                f"parallelize() makes {name} a tensor of {list(wanted.shape)}; of pretrained weights, which are "
                "filled in afterwards, it must make distributed ones, as parallelize_module does"
            )
        if not isinstance(wanted, DTensor):
            out = torch.empty(wanted.shape, dtype=wanted.dtype, device=device)
            source.fill(whole(wanted.shape), out, self._read)
            return out
        shape, offset = compute_local_shape_and_global_offset(wanted.shape, wanted.device_mesh, wanted.placements)
        box: Box = tuple((start, start + size) for start, size in zip(offset, shape, strict=True))
        local = torch.empty(shape, dtype=wanted.dtype, device=device)
        if local.numel():
            source.fill(box, local, self._read)
        return DTensor.from_local(
            local,
            wanted.device_mesh,
            wanted.placements,
            run_check=False,
            shape=wanted.shape,
            stride=wanted.stride(),
        )


def _memory(parameter: nn.Parameter | None) -> torch.UntypedStorage:
    assert parameter is not None
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).untyped_storage()


def _without_memory(model: nn.Module, prefix: str, skip: Collection[int]) -> Iterator[Place]:
    for path, module in model.named_modules():
        if id(module) in skip:
            continue
        for own, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                yield module, own, f"{prefix}{path}.{own}" if path else f"{prefix}{own}"


class Reading:
    """Files stay open, and mapped, as long as this does."""

    def __init__(self) -> None:
        self._open: dict[Path, Any] = {}
        self.bytes = 0  # asked of the files

    def __call__(self, entry: Entry, box: Box) -> Tensor:
        self.bytes += math.prod(stop - start for start, stop in box) * BITS[entry.dtype] // 8
        try:
            if entry.file not in self._open:
                self._open[entry.file] = safe_open(entry.file, framework="pt")
            if not box:
                return self._tensor(entry)
            found: Tensor = self._open[entry.file].get_slice(entry.name)[tuple(slice(*side) for side in box)]
        except (SafetensorError, OSError) as error:
            raise DataError(f"{entry.file}: {entry.name} cannot be read: {error}") from error
        return found

    def _tensor(self, entry: Entry) -> Tensor:
        found: Tensor = self._open[entry.file].get_tensor(entry.name)
        return found


def whole(shape: torch.Size | tuple[int, ...]) -> Box:
    return tuple((0, size) for size in shape)
