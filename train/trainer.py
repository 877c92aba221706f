"""The training loop: one optimizer step is one global batch, each process working on its slice.

What `compile: true` needs: a compiler, and kernels that take batches of any size where sizes differ.

How long training stood still for its checkpoints; they are written while it goes on.

How a global batch is cut into slices: equal ones, or as large as each process is fast.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from pipeline.contract.config import Config
from pipeline.contract.data import Samples
from pipeline.contract.errors import ConfigError, DataError
from pipeline.contract.settings.stages import Train
from pipeline.contract.task import Task
from train.batch_order import Order
from train.chaos_hooks import reached
from train.data import Feed, Job
from train.elastic.preemption import listening
from train.expert_balance import Routing
from train.metrics import Meter, Window
from train.optim import Precision, learning_rate, make_optimizer, seed_step
from train.parallel import make_strategy
from train.parallel.base import Objective, Part, Strategy
from train.pretrained.load import Beginning
from train.process_group import Group
from train.profiling import Tracer, phase
from train.state import Progress
from train.validation import check_texts, validate

if TYPE_CHECKING:
    from train.checkpoint.in_memory import Mirrors
    from train.checkpoint.load import Saved
    from train.checkpoint.store import CheckpointStore
    from train.elastic.attempts import Attempt
    from train.ledger import Ledger
    from train.metrics import Journal


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


def check_compiler(device: torch.device) -> None:
    """Told before anything is trained: torch would find out in the midst of the first step."""
    from torch._inductor import config  # as slow to load as compilation is to start

    names = ["gcc", "clang", "cc"] if device.type == "cuda" else [name for name in config.cpp.cxx if name]
    if not any(shutil.which(name) for name in names):
        raise ConfigError(
            f"train.compile=true: no compiler ({' or '.join(names)}) on {device.type}; "
            "install one (Debian: apt-get install g++), or set train.compile=false"
        )


def sizes_differ(order: Order, cuts: int) -> bool:
    """Whether micro-batches differ in size, every batch being cut into `cuts` of them."""
    return order.samples % (order.steps_per_epoch * cuts) != 0


def take_any_size(batch: Mapping[str, Tensor]) -> None:
    """One graph for all sizes from the first step on.

    Left alone, torch compiles the first size, then a graph for all others; which of the two a step runs depends on
    the sizes before it, so that a resumed run could end with other bits.
    """
    for column in batch.values():
        torch._dynamo.maybe_mark_dynamic(column, 0)


class Pauses:
    """Of this process."""

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0  # since the start
        self._line: list[float] = []  # since the last line of the journal

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        pause = time.perf_counter() - started
        self.count, self.seconds = self.count + 1, self.seconds + pause
        self._line.append(pause)

    def told(self) -> dict[str, float]:
        """For the journal: the mean since its last line; nothing when there was none."""
        line, self._line = self._line, []
        return {"checkpoint_seconds": sum(line) / len(line)} if line else {}


_EVERY = 10  # steps between two looks at the speeds
_MEMORY = 0.5  # how much of the earlier estimate stays


class Balance:
    """Gradients are weighted by slice size, so they are exact however the batch is cut."""

    def __init__(self, kind: Literal["equal", "auto"], group: Group, strategy: Strategy) -> None:
        self._group, self._auto = group, kind == "auto" and group.data_size > 1
        self._strategy = strategy
        self.speeds = [1.0] * group.data_size  # samples per second, on any common scale
        self._samples = self._steps = 0
        self._seconds_before = 0.0

    def slice_of(self, count: int) -> range:
        """This process's share of a global batch of `count` samples."""
        return cut(count, self.speeds)[self._group.data_rank] if self._auto else self._group.slice_of(count)

    def slices(self, count: int) -> dict[int, range]:
        """The same by its number; a process may have several, each worked through by itself."""
        return {self._group.data_rank: self.slice_of(count)} if self._auto else self._strategy.slices(count)

    def observe(self, count: int) -> None:
        """A step with a global batch of `count` samples is done; every few steps all tell how fast they were."""
        if not self._auto:
            return
        if self._steps == 0:
            self._own_seconds()  # whatever warming up and the first step took
        else:
            self._samples += len(self.slice_of(count))
        if self._steps and self._steps % _EVERY == 0:
            found = self._group.gather(self._samples / max(self._own_seconds(), 1e-9))
            old = self.speeds if self._steps > _EVERY else found
            self.speeds = [_MEMORY * before + (1 - _MEMORY) * now for before, now in zip(old, found, strict=True)]
            self._samples = 0
        self._steps += 1

    def told(self) -> dict[str, dict[str, float]]:
        """For the journal: each process's share of the batch; nothing where they are equal by definition."""
        if not self._auto:
            return {}
        return {"batch_share": {f"rank {rank}": speed / sum(self.speeds) for rank, speed in enumerate(self.speeds)}}

    def _own_seconds(self) -> float:
        """What this process worked since the last look, without waiting for the others."""
        self._strategy.stopwatch.collect()
        now, before = self._strategy.traffic.own_seconds, self._seconds_before
        self._seconds_before = now
        return now - before


def cut(count: int, speeds: Sequence[float]) -> list[range]:
    """Consecutive slices in proportion to the speeds; none is empty while there is a sample for each."""
    total, least = sum(speeds), 1 if count >= len(speeds) else 0
    spare = count - least * len(speeds)
    bounds, passed = [0], 0.0
    for i, speed in enumerate(speeds, start=1):
        passed += speed
        bounds.append(least * i + int(spare * (passed / total) + 1e-9))
    bounds[-1] = count
    return [range(start, stop) for start, stop in itertools.pairwise(bounds)]
