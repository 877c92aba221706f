"""Every process holds a share of the weights: cut over the slices of the batch, within each layer, or both."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from pipeline.spec.data import Samples, forward
from pipeline.spec.errors import ConfigError
from pipeline.spec.sections import Train
from train.group import Group
from train.objective import Objective
from train.strategy.alone import Alone, Part
from train.strategy.buffers import only_statistics
from train.strategy.pieces import average, clip, local
from train.strategy.plan import cut_layers
from train.strategy.units import holds_parameters, units

if TYPE_CHECKING:
    from pipeline.spec.task import Outputs


class Sharded(Alone):
    """`parallel: fsdp`, `tensor: N`, or both."""

    def __init__(
        self, model: nn.Module, objective: Objective, group: Group, config: Train, samples: Samples | None = None
    ) -> None:
        self._samples = samples
        self.together = config.parallel == "fsdp"  # the others' weights; those of a tensor group share each batch
        super().__init__(model, objective, group, config)

    def wrap(self) -> nn.Module:
        shape = (self.group.data_size, self.group.model_size)
        self.mesh = init_device_mesh(self.group.device.type, shape, mesh_dim_names=("data", "tensor"))
        self._first = self.mesh.get_local_rank("tensor") == 0  # of those that compute the same
        # As DistributedDataParallel does: what a training pass may read is the first process's before every step.
        self._equal_buffers = self.group.model_size == 1 and not only_statistics(self.model)
        if self.group.model_size > 1:
            cut_layers(self.model, self.objective.task, self.mesh["tensor"], self._try)
        if self.together:
            self._shard()
        return super().wrap()

    def backward(self, parts: Iterable[Part]) -> Tensor:
        if self._equal_buffers:
            self.group.sync_buffers(self.model)
        if self.together:
            total = super().backward(_padded(parts, self.config.accumulate))
        else:
            total = super().backward(parts)
            with self.stopwatch.waiting():
                self._average()
        return total if self._first else torch.zeros_like(total)

    def exchange(self, last: bool) -> contextlib.AbstractContextManager[object]:
        """Weights are gathered for every pass, gradients meet with the last micro-batch."""
        if not isinstance(self.model, FSDPModule):
            return contextlib.nullcontext()
        self.model.set_requires_gradient_sync(last)
        self.traffic.sent_bytes += self._gathered_bytes + last * self._reduced_bytes
        return contextlib.nullcontext()

    def clip(self, limit: float) -> Tensor:
        return clip(self._parameters, limit, self._counts)

    def predict(self, batch: Mapping[str, Tensor]) -> Outputs | None:
        outputs = super().predict(batch)
        return outputs if self._first else None

    def _try(self) -> Outputs:
        """A forward pass of two samples."""
        assert self._samples is not None
        batch = self._samples.batch([0, len(self._samples) - 1])
        return forward(self.model, self.objective.task, {name: c.to(self.group.device) for name, c in batch.items()})

    def _average(self) -> None:
        for parameter in self.model.parameters():
            if isinstance(parameter.grad, DTensor) and isinstance(parameter, DTensor):
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
        if self.group.data_size > 1:
            copies = self.group.data_size
            self.traffic.sent_bytes += average(self.model.parameters(), self.mesh.get_group("data"), copies)

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
        self._refuse_tied(blocks)
        if cast.param_dtype:  # running statistics stay in fp32, and such a layer wants its weights in their type
            for module in self.model.modules():
                if isinstance(module, _BatchNorm) and holds_parameters(module):
                    fully_shard(module, mesh=self.mesh["data"], mp_policy=plain)
        for block in blocks:
            if not isinstance(block, FSDPModule):
                fully_shard(block, mesh=self.mesh["data"], mp_policy=cast)
        fully_shard(self.model, mesh=self.mesh["data"], mp_policy=replace(cast, output_dtype=torch.float32))
        self._count(blocks)

    def _refuse_tied(self, blocks: list[nn.Module]) -> None:
        """Each of two blocks would cut its own copy of a tensor they share, and the copies would drift apart."""
        owner = {id(parameter): block for block in blocks for parameter in block.parameters()}
        for block in blocks:
            for name, parameter in block.named_parameters():
                if owner[id(parameter)] is not block:
                    raise ConfigError(
                        f"train.parallel=fsdp: {name} of {type(block).__name__} is shared by two blocks, which are cut "
                        "one by one; use train.parallel=ddp"
                    )

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
