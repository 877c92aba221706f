"""Every process holds a share of the weights: cut over the slices of the batch, within each layer, or both."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.batchnorm import _BatchNorm

from pipeline.contract.data import Samples, forward
from pipeline.contract.errors import ConfigError
from pipeline.contract.settings.stages import Train
from train.parallel.base import Objective, Part, Strategy
from train.parallel.ddp import only_statistics
from train.parallel.gradients import average, clip, gradients, local
from train.parallel.pipeline_split import Lent, holds_parameters, units
from train.parallel.tensor_parallel import cut_layers, cut_mixtures
from train.pretrained.fill import Filling
from train.process_group import Group

if TYPE_CHECKING:
    from pipeline.contract.task import Outputs


class FullyShardedDataParallel(Strategy):
    """`parallel: fsdp`, `tensor: N`, `expert: N`, or several of them.

    Experts are cut over more processes than the rest, so copies of them are fewer: `copies` is the axis on which their
    gradients meet.
    """

    copies: DeviceMesh

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        group: Group,
        config: Train,
        samples: Samples | None = None,
        filling: Filling | None = None,
    ) -> None:
        self._samples, self._filling = samples, filling
        # The others' weights, or their experts; those of a tensor group share each batch.
        self.together = config.parallel == "fsdp" or config.expert > 1
        super().__init__(model, objective, group, config)

    def wrap(self) -> nn.Module:
        shape = (self.group.data_size, self.group.model_size)
        self.mesh = init_device_mesh(self.group.device.type, shape, mesh_dim_names=("data", "tensor"))
        self._first = self.mesh.get_local_rank("tensor") == 0  # of those that compute the same
        # As DistributedDataParallel does: what a training pass may read is the first process's before every step.
        self._equal_buffers = self.group.model_size == 1 and not only_statistics(self.model)
        if self.group.model_size > 1:
            cut_layers(self.model, self.objective.task, self.mesh["tensor"], self._try, self._lent())
        self._experts = self._cut_experts()
        if self.config.parallel == "fsdp":
            self._shard()
        if self._filling:  # only now: of what was cut, this process reads its own piece
            self._filling.fill(self.model, self.group.device)
        return super().wrap()

    def backward(self, parts: Iterable[Part]) -> Tensor:
        if self._equal_buffers:
            self.group.sync_buffers(self.model)
        total = super().backward(self._counted(_padded(parts, self.config.accumulate) if self.together else parts))
        if self.config.parallel != "fsdp":
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
        experts = [parameter for parameter in self._parameters if _of_experts(parameter)]
        others = [parameter for parameter in self._parameters if not _of_experts(parameter)]
        for parameters, mesh in ((others, self.mesh["data"]), (experts, self.copies)):
            if mesh.size() > 1 and gradients(parameters):
                self.traffic.sent_bytes += average(parameters, mesh.get_group(), mesh.size())

    def _counts(self, parameter: nn.Parameter) -> bool:
        """Of a piece that several processes hold, the first one's is counted."""
        held = {}
        if isinstance(parameter, DTensor):
            names = parameter.device_mesh.mesh_dim_names or ()
            held = dict(zip(names, parameter.placements, strict=True))
        mesh = self._mixture if _of_experts(parameter) else self.mesh
        replicated = [name for name in mesh.mesh_dim_names or () if name not in held or held[name].is_replicate()]
        return all(mesh.get_local_rank(name) == 0 for name in replicated)

    def _cut_experts(self) -> list[nn.Module]:
        """Neighbours among the copies of the model share the experts of every layer."""
        expert, tensor = self.config.expert, self.config.tensor
        if expert * tensor == 1:
            return []
        shape = (self.group.data_size // expert, expert, tensor)
        self._mixture = init_device_mesh(self.group.device.type, shape, mesh_dim_names=("copies", "expert", "tensor"))
        self.copies = self._mixture["copies"]
        holders = self._mixture["expert", "tensor"]
        holders._flatten()  # then one exchange puts whole tensors together, not two
        return cut_mixtures(self.model, holders, self._try, self._lent())

    def _lent(self) -> Lent:
        return Lent(self._filling, self.group.device)

    def _counted(self, parts: Iterable[Part]) -> Iterator[Part]:
        for part in parts:
            self.counting = self._first and part.count > 0
            yield part

    def _shard(self) -> None:
        """Each repeated block by itself, so that only one of them at a time is whole, and the rest with the root."""
        plain, cast = self._policies()
        blocks = [unit.module for unit in units(self.model) if unit.repeated and holds_parameters(unit.module)]
        self._refuse_tied(blocks)
        if cast.param_dtype:  # running statistics stay in fp32, and such a layer wants its weights in their type
            for module in self.model.modules():
                if isinstance(module, _BatchNorm) and holds_parameters(module):
                    fully_shard(module, mesh=self.mesh["data"], mp_policy=plain)
        for module in self._experts:  # over fewer processes, and their arguments in the type they come in
            policy = replace(cast, cast_forward_inputs=False)
            fully_shard(module, mesh=self.copies, mp_policy=policy, shard_placement_fn=self._placement)
        for block in blocks:
            if not isinstance(block, FSDPModule):
                fully_shard(block, mesh=self.mesh["data"], mp_policy=cast)
        fully_shard(self.model, mesh=self.mesh["data"], mp_policy=replace(cast, output_dtype=torch.float32))
        self._count(blocks)

    def _placement(self, parameter: nn.Parameter) -> Shard:
        """Beside the axis of the experts, which is cut already."""
        count = self.copies.size()
        for axis in range(1, parameter.ndim):
            if parameter.shape[axis] % count == 0:
                return Shard(axis)
        raise ConfigError(
            f"train.parallel=fsdp: {count} copies of the experts cannot share weights of {tuple(parameter.shape)}; "
            "use another number of processes, or train.parallel=ddp"
        )

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
        copies = {id(p): self.copies.size() for p in parameters if _of_experts(p)}
        numbers = sum(local(p).numel() * copies[id(p)] if id(p) in copies else p.numel() for p in parameters)
        self._reduced_bytes = numbers * torch.float32.itemsize


def _of_experts(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and "expert" in (parameter.device_mesh.mesh_dim_names or ())


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
