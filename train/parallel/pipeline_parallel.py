"""Pipeline parallelism: micro-batches pass through the stages of a model.

Neighbouring processes have neighbouring stages; with tensor parallelism, neighbouring tensor groups have. A stage may
also be sharded by FSDP over the copies of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from pipeline.contract.task import HasParallelize, Outputs
from pipeline.system.errors import ConfigError
from train.checkpoint.load import SavedCheckpoint
from train.parallel.base import MicroBatch, Objective
from train.parallel.fsdp import FSDPStrategy, pad
from train.parallel.pipeline_split import (
    META,
    SAMPLE_COUNTS,
    DryRun,
    ScalingShape,
    Stage,
    StagePlan,
    TiedWeights,
    Unit,
    check_stage_starts,
    choose_stage_starts,
    dry_run,
    has_trained_parameters,
    units,
)
from train.process_group import ProcessGroup
from train.state import Progress, State, add_prefix, allocate_optimizer_state

_OPTIMIZER = "optimizer."  # prefix of the optimizer's state in a checkpoint


class PipelineStrategy(FSDPStrategy):
    def wrap_model(self) -> nn.Module:
        self._schedules: dict[tuple[int, int], PipelineScheduleSingle] = {}
        self._split_layers()
        self._ranks = dist.get_process_group_ranks(self.mesh.get_group("pipeline"))  # of this copy's stages
        self.model.eval()
        row = list(units(self.model, starts := self._starts_by_task()))
        weights = self._temporary_weights
        with weights.during_forward(self.model):
            recorded = dry_run(row, self._pass_whole)
            self._plan = StagePlan(self.model, row, recorded, starts or self._choose_starts(row, recorded))
        index = self.mesh.get_local_rank("pipeline")
        self._stage = Stage(self.model, self._plan, recorded, index, self.group.device)
        with weights.of_module(self.model, ""):
            self._check(recorded)
        self._stage_module = _StageModule(self._stage, self.objective, self.model, self.group)
        if self.config.strategy == "fsdp":
            stages, parameters = self._plan.stage_by_tensor, self.model.named_parameters(remove_duplicate=False)
            # Autocast stays on: it covers the model's inputs, which do not pass through the module sharded last.
            self._shard(self._stage_module, None, [p for name, p in parameters if stages[name] != index], keep=True)
        if self._materializer:  # only now, so that weights of other stages are not read
            self._materializer.materialize(self.model, self.group.device)
        self._tied_weights = TiedWeights(self._plan.ties, index, self.model)
        self.model.train()
        return self.model

    def compute_gradient(self, micro_batches: Iterable[MicroBatch]) -> Tensor:
        """Run all micro-batches through the pipeline; with FSDP as many of them on every copy of the model."""
        torch.manual_seed(torch.initial_seed() + self._stage.index)  # dropout differs between stages
        if self.collective_forward:
            micro_batches = pad(micro_batches, self.config.accumulate)
        total = self._pass(list(micro_batches))
        if self.config.strategy == "fsdp":  # the schedule has averaged gradients
            self.traffic.sent_bytes += self._gathered_bytes + self._reduced_bytes
        else:
            with self.stopwatch.waiting():
                self._average()
        self.traffic.sent_bytes += self._tied_weights.sum_gradients(self._ranks)
        return total if self._is_first_of_tensor_group else torch.zeros_like(total)

    def sync_weights(self) -> None:
        """Broadcast running statistics from the stage that computes them, on the first copy of the model."""
        for name, buffer in self.model.named_buffers():
            dist.broadcast(buffer, self._plan.stage_by_tensor.get(name, 0) * self.config.tensor_parallel)

    def predict(self, batch: Mapping[str, Tensor]) -> Outputs | None:
        count, index, device = _sample_count(batch), self._stage.index, self.group.device
        received = [shape.empty(count, device) for shape in self._stage.input_shapes]
        for tensor in received:
            dist.recv(tensor, self._ranks[index - 1])
        self._stage_module.begin([MicroBatch(batch, count, 0.0, last=True)], count)
        outputs: Any = self._stage_module(*received)
        if self._stage.is_last:
            return outputs if self._is_first_of_tensor_group else None
        for tensor in outputs:
            dist.send(tensor.contiguous(), self._ranks[index + 1])
        return None

    def weights(self) -> dict[str, Tensor]:
        """Return the weights of this stage; of other stages there are only constants."""
        if isinstance(self._stage_module, FSDPModule):
            self._stage_module.reshard()  # what a forward pass has left whole
        return {name: tensor for name, tensor in super().weights().items() if name not in self._stage.dropped}

    def state(self, optimizer: torch.optim.Optimizer, progress: Progress) -> State:
        """Return what this stage computes; a tensor on every stage is saved by one of them."""
        state = super().state(optimizer, progress)
        stages = self._plan.stage_by_tensor.items()
        others = {f"weights.{name}" for name, stage in stages if stage != self._stage.index}
        tensors = {n: t for n, t in state.tensors.items() if n not in others and not n.startswith(_OPTIMIZER)}
        optimizer_state = self._tied_weights.only_owned(self.optimizer_state(optimizer))
        return replace(state, tensors={**tensors, **add_prefix(_OPTIMIZER, optimizer_state)})

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        return self._tied_weights.to_model_names(super().optimizer_state(optimizer))

    def shared_targets(self, optimizer: torch.optim.Optimizer, saved: SavedCheckpoint) -> dict[str, Tensor]:
        weights = self.weights()
        shapes = self._tied_weights.to_stage_names(saved.shapes(_OPTIMIZER))
        optimizer_state = self._tied_weights.to_model_names(allocate_optimizer_state(self.model, optimizer, shapes))
        return {**add_prefix("weights.", weights), **add_prefix(_OPTIMIZER, optimizer_state)}

    def _is_counted(self, parameter: nn.Parameter) -> bool:
        return super()._is_counted(parameter) and self._tied_weights.is_owned(parameter)

    def _pass(self, micro_batches: list[MicroBatch]) -> Tensor:
        """Make forward and backward passes in the order of the schedule; stages exchange tensors of one size."""
        count = max(_sample_count(micro_batch.columns) for micro_batch in micro_batches)
        targets = torch.arange(len(micro_batches))  # a schedule needs some to split; the loss reads the batch
        try:
            total = self._stage_module.begin(self._track_counting(micro_batches), count)
            schedule = self._schedule(count, len(micro_batches))
            schedule.step(target=targets if self._stage.is_last else None, return_outputs=False)
        except RuntimeError as error:
            raise error.__cause__ or error from None  # what the model raised, without the frames of the schedule
        shapes = (*self._stage.input_shapes, *self._stage.output_shapes)
        bytes_per_batch = sum(shape.numel(count) * shape.dtype.itemsize for shape in shapes)
        self.traffic.sent_bytes += bytes_per_batch * len(micro_batches)
        return total

    def _schedule(self, count: int, micro_batches: int) -> PipelineScheduleSingle:
        """Return 1F1B, or GPipe if there are fewer micro-batches than stages; `count` samples in each of them."""
        if (count, micro_batches) not in self._schedules:
            stages, device = self._plan.stages, self.group.device
            loss = (torch.empty(1, device=META, requires_grad=True),)
            stage = PipelineStage(
                self._stage_module,
                self._stage.index,
                stages,
                device,
                input_args=_meta_tensors(self._stage.input_shapes, count),
                output_args=loss if self._stage.is_last else _meta_tensors(self._stage.output_shapes, count),
                group=self.mesh.get_group("pipeline"),
            )
            schedule = Schedule1F1B if micro_batches >= stages else ScheduleGPipe
            self._schedules[count, micro_batches] = schedule(
                stage, micro_batches, loss_fn=lambda loss, _: loss.sum(), scale_grads=False
            )
        return self._schedules[count, micro_batches]

    def _starts_by_task(self) -> list[str]:
        """Return the first modules of the later stages that the task names, if any."""
        task = self.objective.task
        if not isinstance(task, HasParallelize):
            return []
        names = list(task.parallelize(self.model, self.mesh["pipeline"]) or [])
        check_stage_starts(self.model, names, self.config.pipeline_parallel)
        return names

    def _choose_starts(self, row: list[Unit], recorded: DryRun) -> list[str]:
        modules = {name: self.model.get_submodule(name) for name in dict.fromkeys(recorded.order)}
        repeated_blocks = {unit.name for unit in row if unit.repeated and has_trained_parameters(unit.module)}
        sizes = [sum(p.numel() for p in module.parameters() if p.requires_grad) for module in modules.values()]
        may_start = [name in repeated_blocks and bool(recorded.calls[name].positions) for name in modules]
        return [list(modules)[index] for index in choose_stage_starts(sizes, may_start, self.config.pipeline_parallel)]

    def _pass_whole(self, count: int) -> Outputs:
        """Make a forward pass of the whole model, as validation does, but with gradients."""
        assert self._samples is not None
        batch = self._samples.batch([i % len(self._samples) for i in range(count)])
        return self.objective.outputs(self.model, {name: c.to(self.group.device) for name, c in batch.items()})

    @torch.no_grad()
    def _check(self, recorded: DryRun) -> None:
        """Check every stage by itself; all processes raise the problem that one of them has."""
        problem = ""
        try:
            self._stage.check(recorded, lambda: self._pass_whole(SAMPLE_COUNTS[0]))
        except ConfigError as error:
            problem = str(error)
        for text in self.group.gather(problem):
            if text:
                raise ConfigError(text)


class _StageModule(nn.Module):
    """The module that a schedule calls for every micro-batch; on the last stage it returns the weighted loss.

    What stages exchange is padded to the largest micro-batch, so that all pass through in one schedule.
    """

    def __init__(self, stage: Stage, objective: Objective, model: nn.Module, group: ProcessGroup) -> None:
        super().__init__()
        self._stage, self._objective, self._group = stage, objective, group
        self._model = model
        self._micro_batches: Iterator[MicroBatch] = iter(())
        self._count = 0  # samples in the largest one
        self._total = torch.zeros(0)

    def begin(self, micro_batches: Iterable[MicroBatch], count: int) -> Tensor:
        """Return the sum of losses that the passes will fill; every schedule takes micro-batches in this order."""
        self._micro_batches, self._count = iter(micro_batches), count
        self._total = torch.zeros((), dtype=torch.float64, device=self._group.device)
        return self._total

    def forward(self, *received: Tensor) -> Any:
        batch, stage = next(self._micro_batches), self._stage
        count = _sample_count(batch.columns)  # what counts for nothing has samples, too
        own = [shape.narrow(tensor, count) for shape, tensor in zip(stage.input_shapes, received, strict=True)]
        wants_loss = stage.is_last and self._model.training
        compute = self._objective.loss if wants_loss else self._objective.outputs
        result = stage.run(own, count, lambda: compute(self._model, batch.columns))
        if not stage.is_last:
            return tuple(shape.pad(t, self._count) for shape, t in zip(stage.output_shapes, result, strict=True))
        if not wants_loss:
            return result
        self._total += result.detach().double() * batch.fraction
        return torch.stack([result.float() * batch.fraction * self._group.data_size])  # copies are averaged


def _sample_count(batch: Mapping[str, Tensor]) -> int:
    return len(next(iter(batch.values())))


def _meta_tensors(shapes: Iterable[ScalingShape], count: int) -> tuple[Tensor, ...]:
    return tuple(shape.empty(count, META).requires_grad_() for shape in shapes)
