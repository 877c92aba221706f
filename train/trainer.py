"""The training loop: one optimizer step is one global batch, each process working on its slice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from pipeline.spec.config import Config
from pipeline.spec.data import Samples
from pipeline.spec.errors import ConfigError, DataError
from pipeline.spec.sections import Train
from pipeline.spec.task import Task
from train.balance import Balance
from train.compiling import check_compiler, sizes_differ, take_any_size
from train.feed import Feed, Job
from train.group import Group
from train.leaving import listening
from train.measure import Meter
from train.objective import Objective
from train.optimizer import make_optimizer
from train.order import Order
from train.pauses import Pauses
from train.peril import reached
from train.phase import phase
from train.precision import Precision
from train.pretrained.beginning import Beginning
from train.routing import Routing
from train.schedule import learning_rate
from train.seeding import seed_step
from train.state import Progress
from train.strategy import Part, make_strategy
from train.texts import check_texts
from train.trace import Tracer
from train.validation import validate
from train.window import Window

if TYPE_CHECKING:
    from train.attempts import Attempt
    from train.checkpoint import CheckpointStore, Saved
    from train.journal import Journal
    from train.ledger import Ledger
    from train.snapshot import Mirrors


class Trainer:
    def __init__(
        self,
        task: Task,
        config: Config,
        group: Group,
        train: Samples,
        validation: Samples,
        batch_size: int,
        begin: Callable[[], Beginning] | None = None,
    ) -> None:
        self._task, self._group, self.config, self._validation = task, group, config.train, validation
        self.order = Order(len(train), batch_size, self.config.seed)
        self.total_steps = self.config.epochs * self.order.steps_per_epoch
        slices = _slices(self.config, group, self.order)
        if self.config.compile:
            check_compiler(group.device)
        differ = self.config.balance == "auto" or sizes_differ(self.order, slices * self.config.accumulate)
        self._any_size = self.config.compile and differ
        seed_step(self.config.seed, -1, 0)  # the same weights on every process
        self._precision = Precision(self.config.precision, group.device)
        model, filling = begin() if begin else (task.model(), None)
        check_texts(task, model, (train, validation))
        self.strategy = make_strategy(model, Objective(task, self._precision), group, self.config, train, filling)
        optimizer = make_optimizer(self.strategy.model, self.config.optimizer, self.config.weight_decay)
        self._optimizer = self.strategy.adopt(optimizer)
        self.routing = Routing(self.strategy, group, self.config.expert_balance)
        self._trained = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        self._feed = Feed(train, group, self.config.seed, self.config.workers)
        self._balance = Balance(self.config.balance, group, self.strategy)
        self._meter = Meter(self.strategy, self._feed, self._precision, group)
        self._window = Window()
        self._reviewed = 0  # steps of the window that were looked at
        self.pauses = Pauses()
        self.watch = group.watch
        self._ledger: Ledger | None = None  # steps that count for nothing are in none
        self.attempt: Attempt | None = None
        self.mirrors: Mirrors | None = None  # where snapshots are made
        self.strategy.warm_up(lambda: self._parts(0))
        self.routing.reset()

    def restore(self, saved: Saved) -> None:
        self.strategy.restore(self._optimizer, saved)

    def fit(
        self,
        progress: Progress,
        store: CheckpointStore,
        journal: Journal | None,
        tracer: Tracer | None = None,
        ledger: Ledger | None = None,
    ) -> Progress:
        """Train from `progress` to the end; only the first process has a journal."""
        self._ledger = ledger
        self.strategy.module.train()
        self._feed.start(job for step in range(progress.step, self.total_steps) for job in self._jobs(step))
        self._open_window()
        try:
            with store, listening(self._group, self.strategy.meeting_after, progress.step) as self._leaving:
                return self._walk(progress, store, journal, tracer)
        finally:
            self._feed.stop()  # at once: left to the garbage collector, workers are waited for

    def _walk(
        self, progress: Progress, store: CheckpointStore, journal: Journal | None, tracer: Tracer | None
    ) -> Progress:
        while progress.step < self.total_steps and not self._out_of_patience(progress):
            if tracer:
                tracer.before(progress.step)
            self._step(progress.step)
            progress = replace(progress, step=progress.step + 1)
            if self.attempt:
                self.attempt.stepped(progress.step)
            reached("step")
            ends_epoch = progress.step % self.order.steps_per_epoch == 0
            if ends_epoch or progress.step % self.config.log_every == 0:
                self._log(progress.step, journal)
            if ends_epoch:
                progress = self._end_epoch(progress, journal)
            leaves = self._leaving.due(progress.step) and progress.step < self.total_steps
            if leaves or ends_epoch or _every(self.config.checkpoint_every, progress.step):
                self._save(progress, store)
            elif self.mirrors and _every(self.config.snapshot_every, progress.step):
                self._mirror(progress, self.mirrors)
            if leaves:
                store.wait()
                raise self._leaving.farewell(progress.step)
        if tracer:
            tracer.end(progress.step)
        return progress

    def _step(self, step: int) -> None:
        """One global batch: forward and backward over this process's slice, exchange, update."""
        loss = self.strategy.backward(self._parts(step))
        self.watch.at(step, "update")
        with phase("update"):
            self._update(step, loss)
        self._balance.observe(self.order.size(step))

    def _update(self, step: int, loss: Tensor) -> None:
        lr = learning_rate(step, self.total_steps, self.config.lr, self.config.warmup, self.config.schedule)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._precision.unscale(self._optimizer)
        norm = self.strategy.clip(self.config.clip_norm)
        self._window.add(loss, norm, self.order.size(step))
        if self._group.device.type == "cpu":  # a GPU would have to be waited for: it is looked at with the next line
            self._review(step + 1)
        self._precision.step(self._optimizer)
        for parameter in self._trained:
            parameter.grad = None
        self.routing.stepped()
        self.strategy.updated(step)

    def _parts(self, step: int) -> Iterator[Part]:
        """The micro-batches of this process's slices, fetched one by one; each slice has random numbers of its own."""
        jobs = self._jobs(step)
        for i, job in enumerate(jobs):
            self.watch.at(step, "data")
            with phase("data"):
                batch = self._feed.fetch(job)
            if self._any_size:
                take_any_size(batch)
            self.watch.at(step, "forward and backward")
            if self._ledger:
                self._ledger.fed(step, job.indices)
            if job.part == 0:
                seed_step(self.config.seed, step, job.slice)
            count = len(job.indices)
            yield Part(batch, count, count / self.order.size(step), last=i == len(jobs) - 1, slice=job.slice)

    def _jobs(self, step: int) -> list[Job]:
        indices = self.order.batch(step)
        found = []
        for number, mine in self._balance.slices(len(indices)).items():
            count = min(self.config.accumulate, len(mine))
            cuts = [mine.start + len(mine) * i // count for i in range(count + 1)]
            found += [Job(step, i, indices[cuts[i] : cuts[i + 1]], number) for i in range(count)]
        return found

    def _review(self, step: int) -> None:
        """Stop when a loss or a gradient of the steps since the last look was not finite; `step` steps are done."""
        window, first = self._window, self._reviewed
        loss, norm = window.broken(first)
        self._reviewed = window.steps
        if not self.strategy.lockstep:
            found: list[int | None] = [None] * self._group.size
            found[self._group.rank.rank] = loss if loss is not None else norm
            self._refuse("loss" if loss is not None else "gradient", found, step - window.steps)
        elif norm is not None:  # the gradient is everybody's: all come here together
            self._refuse("loss", self._group.gather(loss), step - window.steps)
            if not self._precision.forgives_overflow:
                self._refuse("gradient", [norm] * self._group.size, step - window.steps)
            self._precision.overflows += window.overflows(first)

    def _refuse(self, what: str, found: list[int | None], window_start: int) -> None:
        known = [place for place in found if place is not None]
        if known:
            ranks = [rank for rank, place in enumerate(found) if place == min(known)]
            raise DataError(not_finite(what, window_start + min(known), ranks))

    def _log(self, step: int, journal: Journal | None) -> None:
        self.watch.at(step - 1, "update")
        self._review(step)
        measured, routed = self._meter.measure(self._window), self.routing.told()
        if measured.broken:  # a loss can be infinite while its gradient is not
            self._refuse("loss", self._group.gather(self._window.broken()[0]), step - self._window.steps)
        if journal:
            plan = {"total_steps": self.total_steps, "batch_size": self.order.batch_size}
            values = {
                **plan,
                "lr": self._optimizer.param_groups[0]["lr"],
                **measured.values,
                **self._balance.told(),
                **routed,
                **self.pauses.told(),
            }
            journal.record(step, self.order.epoch_of(step - 1), values)
        self._open_window()

    def _open_window(self) -> None:
        self._window = Window()
        self._meter.restart()
        self._reviewed = 0

    def _end_epoch(self, progress: Progress, journal: Journal | None) -> Progress:
        self.watch.at(progress.step - 1, "validation")
        epoch = self.order.epoch_of(progress.step - 1)
        found = validate(self._task, self.strategy, self._validation, self._group, self.order.batch_size)
        if journal:
            journal.record(progress.step, epoch, {"validation": found})
            numbers = ", ".join(f"{name} {value:.4f}" for name, value in found.items())
            print(f"epoch {epoch + 1}/{self.config.epochs}: validation {numbers}", flush=True)
        self._window.started = time.perf_counter()
        return judge_epoch(progress, found)

    def _save(self, progress: Progress, store: CheckpointStore) -> None:
        self.watch.at(progress.step - 1, "checkpoint")
        self._review(progress.step)
        with self.pauses.measured():
            store.wait()  # with the last checkpoint the ledger writes its lines
            commit = self._ledger.collect(progress.step) if self._ledger else None
            kept = partial(self.attempt.kept, progress.step) if self.attempt else None
            store.save(self.strategy.state(self._optimizer, progress), commit, kept)

    def _mirror(self, progress: Progress, mirrors: Mirrors) -> None:
        self.watch.at(progress.step - 1, "checkpoint")
        self._review(progress.step)
        mirrors.wait()  # as the store is, for the ledger
        commit = self._ledger.collect(progress.step) if self._ledger else None
        mirrors.save(self.strategy.state(self._optimizer, progress), commit)

    def _out_of_patience(self, progress: Progress) -> bool:
        return 0 < self.config.patience <= progress.stale_epochs


def _slices(config: Train, group: Group, order: Order) -> int:
    """Of each batch; none may be empty."""
    exact = config.elastic == "exact"
    slices = config.elastic_shards if exact else group.data_size
    if order.smallest_batch < slices:
        what = "shards" if exact else "processes"
        raise ConfigError(f"train.batch_size={order.batch_size} leaves some of {slices} {what} without work")
    return slices


def _every(steps: int, step: int) -> bool:
    return steps > 0 and step % steps == 0


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
