"""Memory and numbers for a model that was built without: of each tensor the piece this process holds."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from pipeline.spec.errors import ConfigError
from train.pretrained.reading import Reading, whole
from train.pretrained.source import Box, Source

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
