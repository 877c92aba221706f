"""Sharded weights: FSDP over the slices of the batch, tensor and expert parallelism within layers, or all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from pipeline.contract.data import forward
from pipeline.contract.task import Outputs
from pipeline.system.errors import ConfigError
from pipeline.system.torch_private import BatchNormBase
from train.parallel.base import MicroBatch, Strategy, average_gradients, clip_gradients, local_gradients
from train.parallel.ddp import has_only_running_statistics
from train.parallel.pipeline_split import TemporaryWeights, has_trained_parameters, units
from train.parallel.tensor_parallel import split_experts, split_layers
from train.state import local_shard


class FSDPStrategy(Strategy):
    """Shards weights for `strategy: fsdp`, `tensor_parallel: N`, `expert_parallel: N`, or several of them.

    With `weight_copies` neighbouring processes share the weights of one copy (hybrid sharding).
    Experts are split over more processes than the other layers, so there are fewer copies of them: their gradients
    are averaged over the mesh axis `copies`.
    """

    copies: DeviceMesh

    def wrap_model(self) -> nn.Module:
        # As in DistributedDataParallel: buffers that a training pass may read come from the first process at each step.
        self._sync_buffers = self.group.model_size == 1 and not has_only_running_statistics(self.model)
        names = self._split_layers()
        if self.config.strategy == "fsdp":
            self._shard(self.model, self.objective.precision.cast_by_model())
        if self._materializer:  # only now, so that this process reads its own shards alone
            self._materializer.materialize(self.model, self.group.device)
        self._partial = [self.model.get_parameter(name) for name in names]  # as it is after sharding
        return super().wrap_model()

    def _split_layers(self) -> list[str]:
        """Arrange the processes in a mesh, and split the layers over each tensor group.

        Return the weights of which each process of a tensor group gets a part of the gradient.
        """
        # Passes need other processes' weights or experts. (Processes of one tensor group compute the same batch.)
        self.collective_forward = self.config.strategy == "fsdp" or self.config.expert_parallel > 1
        copies = self.config.weight_copies
        self.mesh = self._make_mesh(copy=copies, data=self.group.data_size // copies)
        self._is_first_of_tensor_group = self.mesh.get_local_rank("tensor") == 0  # all of the group compute the same
        self._temporary_weights = TemporaryWeights(self._materializer, self.group.device)
        names: list[str] = []
        if self.config.tensor_parallel > 1:
            names = split_layers(
                *(self.model, self.objective.task, self.mesh["tensor"], self._try, self._temporary_weights),
                self.config.sequence_parallel,
            )
        self._experts = self._split_experts()
        if self.config.strategy == "fsdp":
            self._refuse_shared_weights(self._blocks())
        return names

    def _make_mesh(self, **sizes: int) -> DeviceMesh:
        """Arrange the processes: neighbours are in one tensor group, and neighbouring groups are pipeline stages."""
        sizes |= {"pipeline": self.config.pipeline_parallel, "tensor": self.config.tensor_parallel}
        axes = {name: size for name, size in sizes.items() if size > 1 or name not in ("copy", "pipeline")}
        return self.group.mesh(tuple(axes.values()), tuple(axes))

    def compute_gradient(self, micro_batches: Iterable[MicroBatch]) -> Tensor:
        if self._sync_buffers:
            self.group.broadcast(self.model.buffers())
        if self.collective_forward:
            micro_batches = pad(micro_batches, self.config.accumulate)
        total = super().compute_gradient(self._track_counting(micro_batches))
        if self.config.strategy != "fsdp":
            with self.stopwatch.waiting():
                self._average()
        if local_gradients(self._partial):
            with self.stopwatch.waiting():  # all gradients of a step at once
                self.traffic.sent_bytes += average_gradients(self._partial, self.mesh["tensor"].get_group(), copies=1)
        return total if self._is_first_of_tensor_group else torch.zeros_like(total)

    def gradient_sync(self, last: bool) -> contextlib.AbstractContextManager[object]:
        """Exchange gradients in the last micro-batch only; weights are gathered in every pass."""
        if not isinstance(self.model, FSDPModule):
            return contextlib.nullcontext()
        self.model.set_requires_gradient_sync(last)
        self.traffic.sent_bytes += self._gathered_bytes + last * self._reduced_bytes
        return contextlib.nullcontext()

    def clip(self, limit: float) -> Tensor:
        return clip_gradients(self._parameters, limit, self._is_counted)

    def predict(self, batch: Mapping[str, Tensor]) -> Outputs | None:
        outputs = super().predict(batch)
        return outputs if self._is_first_of_tensor_group else None

    def _try(self) -> Outputs:
        """Make a forward pass of two samples."""
        assert self._samples is not None
        batch = self._samples.batch(self._samples.ends)
        return forward(self.model, self.objective.task, {name: c.to(self.group.device) for name, c in batch.items()})

    def _average(self) -> None:
        for parameter in self.model.parameters():
            if isinstance(parameter.grad, DTensor) and isinstance(parameter, DTensor):
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
        experts = [parameter for parameter in self._parameters if _is_expert(parameter)]
        dense = [parameter for parameter in self._parameters if not _is_expert(parameter)]
        for parameters, mesh in ((dense, self.mesh["data"]), (experts, self.copies)):
            if mesh.size() > 1 and local_gradients(parameters):
                self.traffic.sent_bytes += average_gradients(parameters, mesh.get_group(), mesh.size())

    def _is_counted(self, parameter: nn.Parameter) -> bool:
        """Return whether this process counts the shard; of a replicated one the first process does."""
        placements = {}
        if isinstance(parameter, DTensor):
            names = parameter.device_mesh.mesh_dim_names or ()
            placements = dict(zip(names, parameter.placements, strict=True))
        mesh = self._expert_mesh if _is_expert(parameter) else self.mesh
        axes = [axis for axis in mesh.mesh_dim_names or () if axis != "pipeline"]  # a shard is on one stage only
        replicated = [axis for axis in axes if axis not in placements or placements[axis].is_replicate()]
        return all(mesh.get_local_rank(axis) == 0 for axis in replicated)

    def _split_experts(self) -> list[nn.Module]:
        """Split the experts of every layer over neighbouring copies of the model."""
        expert = self.config.expert_parallel
        self.copies = self.mesh["data"]
        if expert * self.config.tensor_parallel == 1:
            return []
        self._expert_mesh = self._make_mesh(copies=self.group.data_size // expert, expert=expert)
        self.copies = self._expert_mesh["copies"]
        holders = self._expert_mesh["expert", "tensor"]
        holders._flatten()  # so that one exchange and not two puts whole tensors together
        return split_experts(self.model, holders, self._try, self._temporary_weights)

    def _track_counting(self, micro_batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """Keep `counts_samples` up to date while the micro-batches are computed."""
        for micro_batch in micro_batches:
            self.counts_samples = self._is_first_of_tensor_group and micro_batch.count > 0
            yield micro_batch

    def _blocks(self) -> list[nn.Module]:
        return [unit.module for unit in units(self.model) if unit.repeated and has_trained_parameters(unit.module)]

    def _shard(
        self,
        root: nn.Module,
        cast_type: torch.dtype | None,
        ignored: Collection[nn.Parameter] = (),
        *,
        keep: bool = False,
    ) -> None:
        """Shard each repeated block by itself, so that only one at a time is unsharded; the rest with the root.

        With `keep`, weights stay whole from the first pass of a step to the last.
        """
        wrap = partial(fully_shard, ignored_params=set(ignored), reshard_after_forward=False if keep else None)
        mesh = self.mesh["copy", "data"] if self.config.weight_copies > 1 else self.mesh["data"]
        fp32_policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)  # gradients are always added up in fp32
        cast_policy = replace(fp32_policy, param_dtype=cast_type)
        blocks = self._blocks()
        if cast_policy.param_dtype:  # running statistics stay in fp32, and a batch norm needs its weights in their type
            for module in self.model.modules():
                if isinstance(module, BatchNormBase) and has_trained_parameters(module):
                    wrap(module, mesh=mesh, mp_policy=fp32_policy)
        for module in self._experts:  # over fewer processes, and with arguments in the type they have
            policy = replace(cast_policy, cast_forward_inputs=False)
            if not set(ignored).issuperset(module.parameters()):
                wrap(module, mesh=self.copies, mp_policy=policy, shard_placement_fn=self._placement)
        for block in blocks:
            if not isinstance(block, FSDPModule):
                wrap(block, mesh=mesh, mp_policy=cast_policy)
        wrap(root, mesh=mesh, mp_policy=replace(cast_policy, output_dtype=None if keep else torch.float32))
        self._compute_traffic([] if keep else blocks, cast_type or torch.float32)

    def _placement(self, parameter: nn.Parameter) -> Shard:
        """Return the axis to shard an expert's weights on; the first one is already split over processes."""
        count = self.copies.size()
        for axis in range(1, parameter.ndim):
            if parameter.shape[axis] % count == 0:
                return Shard(axis)
        raise ConfigError(
            f"train.strategy=fsdp: {count} copies of the experts cannot share weights of {tuple(parameter.shape)}; "
            "use another number of processes, or train.strategy=ddp"
        )

    def _refuse_shared_weights(self, blocks: list[nn.Module]) -> None:
        """Refuse weights shared by two blocks: each block would shard its own copy, and the copies would diverge."""
        owner = {id(parameter): block for block in blocks for parameter in block.parameters()}
        for block in blocks:
            for name, parameter in block.named_parameters():
                if owner[id(parameter)] is not block:
                    raise ConfigError(
                        f"train.strategy=fsdp: {name} of {type(block).__name__} is shared by two blocks, which are "
                        "sharded one by one; use train.strategy=ddp"
                    )

    def _compute_traffic(self, blocks: list[nn.Module], dtype: torch.dtype) -> None:
        """Compute the bytes this process sends: its shards for every gathering, and whole gradients once."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        block_parameters = {parameter for block in blocks for parameter in block.parameters()}  # for backward, too
        gatherings = {p: 2 if p in block_parameters else 1 for p in parameters}
        self._gathered_bytes = sum(local_shard(p).numel() * dtype.itemsize * times for p, times in gatherings.items())
        copies = {id(p): self.copies.size() for p in parameters if _is_expert(p)}
        numbers = sum(local_shard(p).numel() * copies[id(p)] if id(p) in copies else p.numel() for p in parameters)
        if self.config.weight_copies > 1:  # then the copies exchange their shards
            numbers += sum(local_shard(p).numel() for p in parameters)
        self._reduced_bytes = numbers * torch.float32.itemsize


def _is_expert(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and "expert" in (parameter.device_mesh.mesh_dim_names or ())


def pad(micro_batches: Iterable[MicroBatch], count: int) -> Iterator[MicroBatch]:
    """Yield `count` micro-batches, even if the slice has fewer: a pass needs the weights of all processes.

    A padding pass repeats the last samples and counts for nothing.
    """
    count_done = 0
    for micro_batch in micro_batches:
        count_done += 1
        yield replace(micro_batch, last=count_done == count)
    while count_done < count:
        count_done += 1
        yield replace(micro_batch, count=0, fraction=0.0, last=count_done == count)
