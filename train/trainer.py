"""The training loop: one optimizer step is one global batch, each process working on its slice."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pipeline.spec.config import Config
from pipeline.spec.data import Samples, forward
from pipeline.spec.errors import DataError
from pipeline.spec.task import Task
from train.checkpoint import CheckpointStore, Progress, State
from train.group import Group
from train.journal import Journal
from train.order import Order
from train.precision import Precision
from train.schedule import learning_rate
from train.seeding import seed_step
from train.validation import validate


@dataclass
class Window:
    """Sums since the last line of the journal."""

    loss: float = 0.0
    samples: int = 0
    steps: int = 0
    waited: float = 0.0
    started: float = 0.0
    broken: int | None = None  # first step whose loss was not finite here


class Trainer:
    def __init__(self, task: Task, config: Config, group: Group, train: Samples, validation: Samples) -> None:
        self._task, self._group, self.config = task, group, config.train
        self._train, self._validation = train, validation
        self.order = Order(len(train), self.config.batch_size, self.config.seed)
        self.total_steps = self.config.epochs * self.order.steps_per_epoch
        seed_step(self.config.seed, -1, 0)  # the same weights on every process
        self.model = task.model().to(group.device)
        self._precision = Precision(self.config.precision, group.device)
        self._optimizer = make_optimizer(self.model, self.config.optimizer, self.config.weight_decay)
        self._wrapped = group.wrap(self.model)
        self._window = Window()
        self._settle_buckets()

    def _settle_buckets(self) -> None:
        """One backward pass that counts for nothing, before any weights are restored.

        DistributedDataParallel orders its buckets anew after the first exchange. Done here, always on the same
        batch, a resumed run sums gradients in the order of the uninterrupted one: with three processes or more
        the order changes the bits.
        """
        if self._wrapped is self.model:
            return
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        for _ in range(2):  # the new order is made at the second forward pass
            batch = self._fetch(next(self._micro_batches(0)))
            with self._precision.autocast():
                loss = self._task.loss(forward(self._wrapped, self._task, batch), batch)
            torch.autograd.backward(loss)
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(buffers[name])
        self._optimizer.zero_grad(set_to_none=True)

    def restore(self, state: State) -> None:
        self.model.load_state_dict(dict(state.weights))
        self._optimizer.load_state_dict(dict(state.optimizer))
        if state.scaler:
            self._precision.scaler.load_state_dict(dict(state.scaler))

    def fit(self, progress: Progress, store: CheckpointStore, journal: Journal | None) -> Progress:
        """Train from `progress` to the end; only the first process has a journal and writes checkpoints."""
        self._wrapped.train()
        self._window = Window(started=time.perf_counter())
        while progress.step < self.total_steps and not self._out_of_patience(progress):
            norm = self._step(progress.step)
            progress = replace(progress, step=progress.step + 1)
            ends_epoch = progress.step % self.order.steps_per_epoch == 0
            if progress.step % self.config.log_every == 0 or ends_epoch:
                self._log(progress.step, norm, journal)
            if ends_epoch:
                progress = self._end_epoch(progress, journal)
            due = self.config.checkpoint_every and progress.step % self.config.checkpoint_every == 0
            if (due or ends_epoch) and self._group.rank.first:
                store.save(self._state(progress))
        return progress

    def _step(self, step: int) -> float:
        """One global batch: forward and backward over this process's slice, exchange, update."""
        seed_step(self.config.seed, step, self._group.rank.rank)
        loss_sum = 0.0
        micro_batches = list(self._micro_batches(step))
        global_size = len(self.order.batch(step))
        for i, indices in enumerate(micro_batches):
            batch = self._fetch(indices)
            with self._no_sync(last=i == len(micro_batches) - 1):
                with self._precision.autocast():
                    loss = self._task.loss(forward(self._wrapped, self._task, batch), batch)
                # Processes are averaged, so each sample's weight is 1/global_size however slices are cut.
                self._precision.backward(loss * (len(indices) * self._group.size / global_size))
            loss_sum += float(loss.detach()) * len(indices)
        norm = self._update(step, loss_sum)
        if self._window.broken is None and not math.isfinite(loss_sum):
            self._window.broken = step
        self._window.loss += loss_sum
        self._window.samples += global_size
        self._window.steps += 1
        return norm

    def _micro_batches(self, step: int) -> Iterator[Any]:
        indices = self.order.batch(step)
        mine = self._group.rank.slice_of(len(indices))
        parts = min(self.config.accumulate, len(mine))
        for i in range(parts):
            yield indices[mine.start + len(mine) * i // parts : mine.start + len(mine) * (i + 1) // parts]

    def _fetch(self, indices: Any) -> dict[str, Tensor]:
        started = time.perf_counter()
        batch = self._train.batch(indices)
        batch = {name: column.to(self._group.device) for name, column in batch.items()}
        self._window.waited += time.perf_counter() - started
        return batch

    def _no_sync(self, last: bool) -> contextlib.AbstractContextManager[object]:
        """Gradients are exchanged once a step, with the last micro-batch."""
        if last or not isinstance(self._wrapped, DistributedDataParallel):
            return contextlib.nullcontext()
        return self._wrapped.no_sync()

    def _update(self, step: int, loss_sum: float) -> float:
        config = self.config
        lr = learning_rate(step, self.total_steps, config.lr, config.warmup, config.schedule)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._precision.unscale(self._optimizer)
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), config.clip_norm or math.inf))
        if not math.isfinite(norm):
            self._check_finite(step, loss_sum)
        self._precision.step(self._optimizer)
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def _check_finite(self, step: int, loss_sum: float) -> None:
        """All processes see the same gradients after the exchange, so all come here together."""
        finite = self._group.gather(math.isfinite(loss_sum))
        if bad := [rank for rank, fine in enumerate(finite) if not fine]:
            raise DataError(not_finite("loss", step, bad))
        if not self._precision.forgives_overflow:
            raise DataError(not_finite("gradient", step, list(range(self._group.size))))

    def _log(self, step: int, norm: float, journal: Journal | None) -> None:
        window, now = self._window, time.perf_counter()
        seconds = max(now - window.started, 1e-9)
        # A loss can be infinite while its gradient is not, so the sums are looked at too.
        broken, loss = self._group.total([window.broken is not None, window.loss])
        if broken:
            steps = self._group.gather(window.broken)
            first = min(found for found in steps if found is not None)
            raise DataError(not_finite("loss", first, [rank for rank, found in enumerate(steps) if found == first]))
        if journal:
            values = {
                "loss": loss / window.samples,
                "lr": self._optimizer.param_groups[0]["lr"],
                "grad_norm": norm if math.isfinite(norm) else None,
                "samples_per_second": window.samples / seconds,
                "step_seconds": seconds / window.steps,
                "data_wait_share": window.waited / seconds,
            }
            known = {name: value for name, value in values.items() if value is not None}
            journal.record(step, self.order.epoch_of(step - 1), known)
        self._window = Window(started=time.perf_counter())

    def _end_epoch(self, progress: Progress, journal: Journal | None) -> Progress:
        epoch = self.order.epoch_of(progress.step - 1)
        found = validate(self._task, self.model, self._validation, self._group, self._precision, self.config.batch_size)
        if journal:
            journal.record(progress.step, epoch, {"validation": found})
            numbers = ", ".join(f"{name} {value:.4f}" for name, value in found.items())
            print(f"epoch {epoch + 1}/{self.config.epochs}: validation {numbers}", flush=True)
        self._window.started = time.perf_counter()
        return judge_epoch(progress, found)

    def _out_of_patience(self, progress: Progress) -> bool:
        return 0 < self.config.patience <= progress.stale_epochs

    def _state(self, progress: Progress) -> State:
        return State(
            progress=progress,
            weights=self.model.state_dict(),
            optimizer=self._optimizer.state_dict(),
            scaler=self._precision.scaler.state_dict(),
        )


def judge_epoch(progress: Progress, validation: dict[str, float]) -> Progress:
    """Is this the best epoch so far, or one more without a gain?"""
    if progress.best_loss is not None and validation["loss"] >= progress.best_loss:
        return replace(progress, stale_epochs=progress.stale_epochs + 1)
    return replace(
        progress,
        best_step=progress.step,
        best_loss=validation["loss"],
        best_validation=validation,
        stale_epochs=0,
    )


def not_finite(what: str, step: int, ranks: list[int]) -> str:
    places = "rank " + ", ".join(map(str, ranks))
    return (
        f"the {what} is not finite at step {step} on {places}; checkpoints made so far are kept. "
        "Lower train.lr, set train.clip_norm, or look at the data of that step"
    )


def make_optimizer(model: nn.Module, kind: str, weight_decay: float) -> torch.optim.Optimizer:
    """Biases and norms, the parameters of one axis, are not decayed."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=0.9)
    return torch.optim.AdamW(groups, lr=0.0)
