"""Pipeline parallel: consecutive processes hold consecutive stages of the model and work on micro-batches in turn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.utils._pytree import tree_leaves

from pipeline.contract.data import Samples
from pipeline.contract.errors import ConfigError
from pipeline.contract.settings.stages import Train
from pipeline.contract.task import HasParallelize
from train.parallel.base import Objective, Part, Strategy
from train.parallel.gradients import average, clip
from train.parallel.pipeline_split import (
    FEW,
    Cut,
    Lent,
    Rehearsal,
    Stage,
    Tied,
    Unit,
    cannot,
    check_begins,
    choose_begins,
    holds_parameters,
    rehearse,
    units,
)
from train.pretrained.fill import Filling
from train.process_group import Group
from train.state import Progress, State, above, room_for_optimizer

if TYPE_CHECKING:
    from pipeline.contract.task import Outputs
    from train.checkpoint.load import Saved


_MOMENTS = "optimizer."


class PipelineParallel(Strategy):
    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        group: Group,
        config: Train,
        samples: Samples | None,
        filling: Filling | None = None,
    ) -> None:
        assert samples is not None
        self._samples, self._filling = samples, filling
        self._schedules: dict[tuple[int, int], PipelineScheduleSingle] = {}
        super().__init__(model, objective, group, config)

    def wrap(self) -> nn.Module:
        shape = (self.group.data_size, self.group.model_size)
        self.mesh = init_device_mesh(self.group.device.type, shape, mesh_dim_names=("data", "pipeline"))
        self.model.eval()
        row = list(units(self.model, wanted := self._named_begins()))
        with Lent(self._filling, self.group.device).passing(self.model):
            seen = rehearse(row, self._try)
            self._cut = Cut(self.model, row, seen, wanted or self._chosen_begins(row, seen))
        index = self.mesh.get_local_rank("pipeline")
        self._stage = Stage(self.model, self._cut, seen, index, self.group.device)
        if self._filling:  # only now: what other stages hold has its place taken
            self._filling.fill(self.model, self.group.device)
        self._tied = Tied(self._cut.ties, index, self.model)
        self._passage = _Passage(self._stage, self.objective, self.model, self.group)
        self._check(seen.outputs)
        self.model.train()
        return self.model

    def backward(self, parts: Iterable[Part]) -> Tensor:
        """Micro-batches of one size go through the pipeline together; sizes differ by one sample at most."""
        torch.manual_seed(torch.initial_seed() + self._stage.index)  # no two stages drop the same places
        sizes: dict[int, list[Part]] = {}
        for part in parts:
            sizes.setdefault(part.count, []).append(part)
        total = torch.zeros((), dtype=torch.float64, device=self.group.device)
        for count, alike in sorted(sizes.items()):
            total += self._pass(count, alike)
        if self.group.data_size > 1:
            with self.stopwatch.waiting():
                copies = self.group.data_size
                self.traffic.sent_bytes += average(self.model.parameters(), self.mesh.get_group("data"), copies)
        self.traffic.sent_bytes += self._tied.add_up(self.group.rank.rank)
        return total

    def clip(self, limit: float) -> Tensor:
        own = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        return clip(own, limit, lambda one: self.group.data_rank == 0 and self._tied.counts(one))

    def settle(self) -> None:
        """Running statistics are those of the stage that computes them, on the first copy of the model."""
        for name, buffer in self.model.named_buffers():
            dist.broadcast(buffer, self._cut.tensors.get(name, 0))

    def predict(self, batch: Mapping[str, Tensor]) -> Outputs | None:
        count, rank = len(next(iter(batch.values()))), self.group.rank.rank
        received = tuple(torch.empty(s.at(count), dtype=s.dtype, device=self.group.device) for s in self._stage.takes)
        for tensor in received:
            dist.recv(tensor, rank - 1)
        answer = self._stage.run(received, count, lambda: self.objective.outputs(self.model, batch))
        if self._stage.last:
            found: Outputs = answer
            return found
        for tensor in answer:
            dist.send(tensor.contiguous(), rank + 1)
        return None

    def weights(self) -> dict[str, Tensor]:
        """Of other stages, constants alone."""
        return {name: tensor for name, tensor in super().weights().items() if name not in self._stage.left_out}

    def state(self, optimizer: torch.optim.Optimizer, progress: Progress) -> State:
        """What stands on every stage is told by the one that computes it."""
        found = super().state(optimizer, progress)
        strange = {f"weights.{name}" for name, stage in self._cut.tensors.items() if stage != self._stage.index}
        tensors = {n: tensor for n, tensor in found.tensors.items() if n not in strange and not n.startswith(_MOMENTS)}
        moments = self._tied.without(self.moments(optimizer))
        return replace(found, tensors={**tensors, **above(_MOMENTS, moments)})

    def moments(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        return self._tied.of_whole(super().moments(optimizer))

    def shared_room(self, optimizer: torch.optim.Optimizer, saved: Saved) -> dict[str, Tensor]:
        stored = self._tied.of_stage(saved.shapes(_MOMENTS))
        moments = self._tied.of_whole(room_for_optimizer(self.model, optimizer, stored))
        return {**above("weights.", self.weights()), **above(_MOMENTS, moments)}

    def _pass(self, count: int, parts: list[Part]) -> Tensor:
        """Forward and backward of micro-batches of `count` samples, in the order of the schedule."""
        places = torch.arange(len(parts))
        try:
            total = self._passage.begin(parts)
            self._schedule(count, len(parts)).step(target=places if self._stage.last else None, return_outputs=False)
        except RuntimeError as error:
            raise error.__cause__ or error from None  # what the model raised, not that a schedule was at work
        width = sum(shape.numel(count) * shape.dtype.itemsize for shape in (*self._stage.takes, *self._stage.gives))
        self.traffic.sent_bytes += width * len(parts)
        return total

    def _schedule(self, count: int, parts: int) -> PipelineScheduleSingle:
        """1F1B needs as many micro-batches as there are stages."""
        if (count, parts) not in self._schedules:
            stages, device = self._cut.stages, self.group.device
            takes = tuple(
                torch.empty(s.at(count), dtype=s.dtype, device="meta", requires_grad=True) for s in self._stage.takes
            )
            gives = tuple(
                torch.empty(s.at(count), dtype=s.dtype, device="meta", requires_grad=True) for s in self._stage.gives
            )
            loss = (torch.empty(1, device="meta", requires_grad=True),)
            stage = PipelineStage(
                self._passage,
                self._stage.index,
                stages,
                device,
                input_args=takes,
                output_args=loss if self._stage.last else gives,
                group=self.mesh.get_group("pipeline"),
            )
            kind = Schedule1F1B if self.config.pipeline_schedule == "1f1b" and parts >= stages else ScheduleGPipe
            self._schedules[count, parts] = kind(stage, parts, loss_fn=_weighted, scale_grads=False)
        return self._schedules[count, parts]

    def _named_begins(self) -> list[str]:
        """By the task, if it names any."""
        task = self.objective.task
        if not isinstance(task, HasParallelize):
            return []
        names = list(task.parallelize(self.model, self.mesh["pipeline"]) or [])
        check_begins(self.model, names, self.group.model_size)
        return names

    def _chosen_begins(self, row: list[Unit], seen: Rehearsal) -> list[str]:
        called = {name: self.model.get_submodule(name) for name in dict.fromkeys(seen.order)}
        repeated = {unit.name for unit in row if unit.repeated and holds_parameters(unit.module)}
        sizes = [sum(p.numel() for p in module.parameters() if p.requires_grad) for module in called.values()]
        may_begin = [name in repeated and bool(seen.calls[name].places) for name in called]
        return [list(called)[place] for place in choose_begins(sizes, may_begin, self.group.model_size)]

    def _try(self, count: int) -> Outputs:
        """A pass of the whole model, as validation makes it but for gradients."""
        return self.objective.outputs(self.model, self._example(count))

    def _example(self, count: int) -> dict[str, Tensor]:
        batch = self._samples.batch([i % len(self._samples) for i in range(count)])
        return {name: column.to(self.group.device) for name, column in batch.items()}

    def _check(self, expected: Outputs) -> None:
        """The stages together answer what the whole model did."""
        with torch.no_grad():
            found = self.predict(self._example(FEW[0]))
        pairs = zip(tree_leaves(found), tree_leaves(expected), strict=True) if self._stage.last else ()
        same = all(torch.allclose(a, b, rtol=0.01, atol=0.01 * float(b.detach().abs().max())) for a, b in pairs)
        if not all(self.group.gather(same)):
            raise ConfigError(
                cannot("its outputs differ then, so more goes from stage to stage than each unit hands to the next")
            )


class _Passage(nn.Module):
    """What a schedule calls: the way of the next micro-batch through this stage, and at its end the weighted loss."""

    def __init__(self, stage: Stage, objective: Objective, model: nn.Module, group: Group) -> None:
        super().__init__()
        self._stage, self._objective, self._group = stage, objective, group
        self._model = model
        self._parts: Iterator[Part] = iter(())
        self._total = torch.zeros(0)

    def begin(self, parts: Iterable[Part]) -> Tensor:
        """The sum of losses that the passes will fill; micro-batches come in this order in any schedule."""
        self._parts = iter(parts)
        self._total = torch.zeros((), dtype=torch.float64, device=self._group.device)
        return self._total

    def forward(self, *received: Tensor) -> Any:
        part = next(self._parts)
        found = self._stage.run(received, part.count, lambda: self._objective.loss(self._model, part.batch))
        if not self._stage.last:
            return found
        self._total += found.detach() * part.count
        return (found.float() * (part.share * self._group.data_size))[None]  # copies are averaged


def _weighted(loss: Tensor, _: Tensor) -> Tensor:
    return loss.sum()
