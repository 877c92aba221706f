"""Every process holds a share of the weights: cut over the slices of the batch, within each layer, or both."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from train.strategy.alone import Alone, Part
from train.strategy.pieces import clip, local
from train.strategy.units import holds_parameters, units


class Sharded(Alone):
    together = True

    def wrap(self) -> nn.Module:
        self.mesh = init_device_mesh(self.group.device.type, (self.group.data_size,), mesh_dim_names=("data",))
        self._shard()
        return super().wrap()

    def backward(self, parts: Iterable[Part]) -> Tensor:
        return super().backward(_padded(parts, self.config.accumulate))

    def exchange(self, last: bool) -> contextlib.AbstractContextManager[object]:
        """Weights are gathered for every pass, gradients meet with the last micro-batch."""
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(last)
        self.traffic.sent_bytes += self._gathered_bytes + last * self._reduced_bytes
        return contextlib.nullcontext()

    def clip(self, limit: float) -> Tensor:
        return clip(list(self.model.parameters()), limit, self._counts)

    def _counts(self, parameter: nn.Parameter) -> bool:
        """Of a piece that several processes hold, the first one's is counted."""
        held = {}
        if isinstance(parameter, DTensor):
            names = parameter.device_mesh.mesh_dim_names or ()
            held = dict(zip(names, parameter.placements, strict=True))
        replicated = [name for name in self.mesh.mesh_dim_names or () if name not in held or held[name].is_replicate()]
        return all(self.mesh.get_local_rank(name) == 0 for name in replicated)

    def _shard(self) -> None:
        """Each repeated block by itself, so that only one of them at a time is whole, and the rest with the root."""
        plain, cast = self._policies()
        blocks = [unit.module for unit in units(self.model) if unit.repeated and holds_parameters(unit.module)]
        if cast.param_dtype:  # running statistics stay in fp32, and such a layer wants its weights in their type
            for module in self.model.modules():
                if isinstance(module, _BatchNorm) and holds_parameters(module):
                    fully_shard(module, mesh=self.mesh["data"], mp_policy=plain)
        for block in blocks:
            if not isinstance(block, FSDPModule):
                fully_shard(block, mesh=self.mesh["data"], mp_policy=cast)
        fully_shard(self.model, mesh=self.mesh["data"], mp_policy=replace(cast, output_dtype=torch.float32))
        self._count(blocks)

    def _policies(self) -> tuple[MixedPrecisionPolicy, MixedPrecisionPolicy]:
        """Without and with a cast of the gathered weights; gradients are always summed up in fp32."""
        plain = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        return plain, replace(plain, param_dtype=self.objective.precision.cast_by_model())

    def _count(self, blocks: list[nn.Module]) -> None:
        """Bytes this process hands over: its pieces for each gathering, and whole gradients once."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        again = {parameter for block in blocks for parameter in block.parameters()}  # for the backward pass too
        width = (self.objective.precision.type or torch.float32).itemsize
        self._gathered_bytes = sum(local(p).numel() * width * (2 if p in again else 1) for p in parameters)
        self._reduced_bytes = sum(p.numel() for p in parameters) * torch.float32.itemsize


def _padded(parts: Iterable[Part], count: int) -> Iterator[Part]:
    """As many passes on every process, also where a slice has fewer samples: each needs the others' weights.

    A pass that is one too many takes the last samples again and counts for nothing.
    """
    done = 0
    for part in parts:
        done += 1
        yield replace(part, last=done == count)
    while done < count:
        done += 1
        yield replace(part, count=0, share=0.0, last=done == count)
