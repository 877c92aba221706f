"""The training loop: one optimizer step is one global batch, each process computes its slice of it.

The file reads in the order of training: set up, the loop, one step, then what happens between steps (checks, metrics,
validation, checkpoints), then the balance of slices between fast and slow processes.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from pipeline.contract.config import Config
from pipeline.contract.data import Samples
from pipeline.contract.restarts import newest_attempt, read_events, record_event
from pipeline.contract.run import Run
from pipeline.contract.settings.stages import Train
from pipeline.contract.task import HasLossWeight, Task
from pipeline.system.errors import ConfigError, DataError, clear_passing
from train.batch_order import BatchOrder, check_order, count_steps
from train.chaos_hooks import run_chaos_hook
from train.checkpoint.load import SavedCheckpoint
from train.checkpoint.store import CheckpointStore
from train.data import BatchLoader, LoadedBatch, LoadRequest
from train.device.compilation import batch_sizes_differ, check_compiler, keep_compile_cache, mark_batch_dynamic
from train.device.flops import measure_flops
from train.device.memory_format import choose_input_formats
from train.elastic.preemption import preemption_handler
from train.expert_balance import ExpertBalance
from train.ledger import LEDGER_FILE, Ledger, last_attempt
from train.metrics import MetricsLog, StepMeter, StepWindow
from train.optim import Precision, check_optimizer_state, learning_rate, make_optimizer, seed_step, set_learning_rate
from train.parallel import make_strategy
from train.parallel.base import MicroBatch, Objective, Strategy
from train.parallel.blocks import compile_blocks, recompute_blocks
from train.pretrained.load import CreateModel
from train.process_group import ProcessGroup
from train.profiling import StepTracer, phase
from train.state import Progress
from train.validation import IDS, check_texts, loss_weight, validate, whole_groups

PREFETCH = 1  # micro-batches that are copied to a GPU ahead of time, while the step before is computed


class Trainer:
    def __init__(
        self,
        task: Task,
        config: Config,
        group: ProcessGroup,
        train: Samples,
        validation: Samples,
        batch_size: int,
        create_model: CreateModel | None = None,
        order: BatchOrder | None = None,
        resumes: bool = False,
    ) -> None:
        """`resumes`: `restore` is called before `fit`."""
        self._task, self._group, self.config = task, group, config.train
        self._weighted = task if isinstance(task, HasLossWeight) else None  # asking at every step would take time
        self._validation, self._validation_cuts = whole_groups(task, validation)
        self.order = order or BatchOrder(len(train), batch_size, self.config.seed)
        self.total_steps = count_steps(self.config, self.order, _tokens_per_sample(self.config, train))
        self._slice_count = slices = _count_slices(self.config, group, self.order)
        if self.config.compile:
            check_compiler(self.config, group.device)
            keep_compile_cache()
        self._any_length = train.has_collate
        sizes_differ = self.config.balance == "auto" or batch_sizes_differ(self.order, slices * self.config.accumulate)
        self._any_size = bool(self.config.compile) and (sizes_differ or self._any_length)
        seed_step(self.config.seed, -1, 0)  # the same weights on every process
        self._precision = Precision(self.config.precision, group.device)
        model, materializer = create_model() if create_model else (task.model(), None)
        check_texts(task, model, (train, validation))
        if self.config.compile == "blocks":
            compile_blocks(model, self._any_size)
        if self.config.recompute == "blocks":
            recompute_blocks(model)
        formats = choose_input_formats(model, task, train, group.device, logs=group.rank.first)
        objective = Objective(task, self._precision, formats)
        self.strategy = make_strategy(model, objective, group, self.config, train, materializer)
        optimizer = make_optimizer(self.strategy.model, self.config, task)
        self._optimizer = self.strategy.wrap_optimizer(optimizer)
        self.expert_balance = ExpertBalance(self.strategy, group)
        self._trained = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        # With `balance: auto`, loading is part of the measured speed of a process, so it stays within the step.
        prefetch = PREFETCH if self.config.balance == "equal" else 0
        self._loader = BatchLoader(train, group, self.config.seed, self.config.workers, prefetch)
        self._balance = BatchBalance(self.config.balance, group, self.strategy)
        self._window = StepWindow()
        self._checked_steps = 0  # steps of the window whose loss and gradient were checked
        self.pauses = CheckpointPauses()
        self.heartbeat = group.heartbeat
        self._ledger: Ledger | None = None  # None: these steps do not count
        self.attempt: AttemptReporter | None = None
        self.flops = measure_flops(self.strategy, self.config, lambda: self._micro_batches(0))
        self._meter = StepMeter(self.strategy, self._loader, self._precision, group, self.flops)
        self.strategy.warm_up(lambda: self._micro_batches(0), resumes)
        self.expert_balance.reset()

    def restore(self, saved: SavedCheckpoint) -> None:
        self.strategy.restore(self._optimizer, saved)

    def choose_best_again(self, progress: Progress) -> Progress:
        """Make the checkpoint of this step, whose weights were restored, the best so far; all take part."""
        self.heartbeat.at(progress.step - 1, "validation")
        means = validate(
            self._task, self.strategy, self._validation, self._group, self.order.batch_size, self._validation_cuts
        )
        return replace(progress, best_step=progress.step, best_loss=means["loss"], best_validation=means)

    def fit(
        self,
        progress: Progress,
        store: CheckpointStore,
        log: MetricsLog | None,
        tracer: StepTracer | None = None,
        ledger: Ledger | None = None,
    ) -> Progress:
        """Train from `progress` to the end and return the final progress; only the first process has a log."""
        self._ledger = ledger
        self._loader.checksums = ledger.checksums if ledger else None
        self.strategy.module.train()
        self._loader.start(
            request for step in range(progress.step, self.total_steps) for request in self._requests(step)
        )
        self._open_window()
        try:
            with (
                store,
                preemption_handler(self._group, self.strategy.next_sync_step, progress.step) as self._preemption,
            ):
                return self._run(progress, store, log, tracer)
        finally:
            self._loader.stop()  # at once: the garbage collector would wait for the workers

    def _run(
        self, progress: Progress, store: CheckpointStore, log: MetricsLog | None, tracer: StepTracer | None
    ) -> Progress:
        first_step = progress.step + 1
        while progress.step < self.total_steps and not self._is_stale(progress):
            if tracer:
                tracer.before(progress.step)
            self._step(progress.step)
            progress = replace(progress, step=progress.step + 1)
            if progress.step == first_step:
                check_optimizer_state(self._optimizer)
                if self.attempt:
                    self.attempt.step_done(first_step)
            run_chaos_hook("step")
            validates = progress.step == self._next_validation(progress.step - 1)
            if validates or progress.step % self.config.log_every == 0:
                self._log(progress.step, log)
            if validates:
                progress = self._validate(progress, log)
            evicted = self._preemption.is_due(progress.step) and progress.step < self.total_steps
            every = self.config.checkpoint_every
            if evicted or validates or (every and progress.step % every == 0):
                self._save(progress, store)
            if evicted:
                store.wait()
                raise self._preemption.eviction_error(progress.step)
        if tracer:
            tracer.end(progress.step)
        return progress

    def _next_validation(self, step: int) -> int:
        """Return the first step after `step` that is followed by validation and a checkpoint."""
        intervals = [self.order.steps_per_epoch, *filter(None, [self.config.validate_every])]
        return min(self.total_steps, *((step // interval + 1) * interval for interval in intervals))

    def _step(self, step: int) -> None:
        """Run one global batch: forward and backward over this process's slice, exchange, update."""
        loss = self.strategy.compute_gradient(self._micro_batches(step))
        if self._loader.prefetches:
            self._load_ahead(step)
        self.heartbeat.at(step, "update")
        with phase("update"):
            self._update(step, loss * self.order.size(step))  # this slice's part of the summed loss
        self._balance.observe(len(self.order.cuts(step)) - 1)

    def _update(self, step: int, loss: Tensor) -> None:
        set_learning_rate(self._optimizer, learning_rate(step, self.total_steps, self.config))
        self._precision.unscale(self._optimizer)
        norm = self.strategy.clip(self.config.clip_norm)
        self._window.add(loss, norm, self.order.size(step))
        if self._group.device.type == "cpu":  # on a GPU this would wait: it is checked with the next log line
            self._check_finite(step + 1)
        if self._ledger and self._precision.forgives_overflow:
            self._ledger.record_norm(step, norm)
        self._precision.step(self._optimizer)
        for parameter in self._trained:
            parameter.grad = None
        self.expert_balance.after_update()
        self.strategy.after_update(step)

    def _micro_batches(self, step: int) -> Iterator[MicroBatch]:
        """Yield the micro-batches of this process's slices.

        Random numbers are seeded before the first micro-batch of each slice. Each micro-batch is loaded when the
        strategy takes it; with a task's loss weights, all are loaded first.
        """
        requests = self._requests(step)
        for i, (request, batch, fraction) in enumerate(self._load_weighted(step, requests)):
            self.heartbeat.at(step, "forward and backward")
            if self._ledger:
                self._ledger.record(step, batch.indices, batch.checksums)
            if request.part == 0:
                seed_step(self.config.seed, step, request.slice)
            last = i == len(requests) - 1
            yield MicroBatch(batch.columns, len(request.indices), fraction, last, slice=request.slice)

    def _load_weighted(
        self, step: int, requests: list[LoadRequest]
    ) -> Iterator[tuple[LoadRequest, LoadedBatch, float | Tensor]]:
        """Yield each batch with its fraction of the global batch: of its samples, or of the weight of its loss."""
        size = self.order.size(step)
        if self._weighted is None:
            yield from ((request, self._load(request), len(request.indices) / size) for request in requests)
            return
        batches = [self._load(request) for request in requests]  # all of them, since their weights are divided by a sum
        weights = [loss_weight(self._weighted, batch.columns) for batch in batches]
        by_slice = torch.zeros(self._slice_count, dtype=torch.float64, device=self._group.device)
        for request, weight in zip(requests, weights, strict=True):
            by_slice[request.slice] += weight
        if self.strategy.lockstep:
            total = self._group.maximum(by_slice).sum()  # in one order of slices, however many processes there are
        else:
            total = by_slice.sum() * self._group.data_size  # each process makes its own steps
        fractions = (torch.where(total > 0, weight / total, 0.0) for weight in weights)
        yield from zip(requests, batches, fractions, strict=True)

    def _load(self, request: LoadRequest) -> LoadedBatch:
        self.heartbeat.at(request.step, "data")
        with phase("data"):
            batch = self._loader.fetch(request)
        if self._any_size:
            mark_batch_dynamic(batch.columns, self._any_length)
        return batch

    def _load_ahead(self, step: int) -> None:
        """Load the first micro-batches after this step while the GPU computes it."""
        self.heartbeat.at(step, "data")
        later = range(step + 1, self.total_steps)
        with phase("data"):
            self._loader.prefetch(request for later_step in later for request in self._requests(later_step))

    def _requests(self, step: int) -> list[LoadRequest]:
        indices, places, epoch = self.order.batch(step), self.order.cuts(step), self.order.epoch_of(step)
        requests = []
        for number, units in self._balance.slices(len(places) - 1).items():  # samples, or groups that stay whole
            count = min(self.config.accumulate, len(units))
            cuts = [places[units.start + len(units) * i // count] for i in range(count + 1)]
            requests += [LoadRequest(step, i, indices[cuts[i] : cuts[i + 1]], number, epoch) for i in range(count)]
        return requests

    def _check_finite(self, step: int) -> None:
        """Raise when a loss or gradient since the last check was not finite; `step` counts from 1."""
        window, first = self._window, self._checked_steps
        bad_loss, bad_norm = window.first_nonfinite(first)  # steps of the window
        self._checked_steps = window.steps
        if not self.strategy.lockstep:
            steps: list[int | None] = [None] * self._group.size
            steps[self._group.rank.rank] = bad_loss if bad_loss is not None else bad_norm
            self._raise_not_finite("loss" if bad_loss is not None else "gradient", steps, step - window.steps)
        elif bad_norm is not None:  # all processes have the same gradient, so all get here
            self._raise_not_finite("loss", self._group.gather(bad_loss), step - window.steps)
            if not self._precision.forgives_overflow:
                self._raise_not_finite("gradient", [bad_norm] * self._group.size, step - window.steps)
            self._precision.overflows += window.overflows(first)

    def _raise_not_finite(self, quantity: str, by_rank: list[int | None], window_start: int) -> None:
        """Raise for the earliest bad step; `by_rank` has each process's first, counted from 0 at the window's start."""
        bad_steps = [step for step in by_rank if step is not None]
        if bad_steps:
            ranks = [rank for rank, step in enumerate(by_rank) if step == min(bad_steps)]
            raise DataError(not_finite_message(quantity, window_start + min(bad_steps) + 1, ranks))

    def _log(self, step: int, log: MetricsLog | None) -> None:
        """Write a line about the steps since the last one; `step` counts from 1."""
        self.heartbeat.at(step - 1, "update")
        self._check_finite(step)
        measured, expert_metrics = self._meter.measure(self._window), self.expert_balance.metrics()
        if measured.is_nonfinite:  # a loss can be infinite while its gradient is not
            self._raise_not_finite(
                "loss", self._group.gather(self._window.first_nonfinite()[0]), step - self._window.steps
            )
        if log:
            values = {
                "total_steps": self.total_steps,
                "batch_size": self.order.batch_size,
                "lr": learning_rate(step - 1, self.total_steps, self.config),
                **measured.values,
                **self._balance.metrics(),
                **expert_metrics,
                **self.pauses.metrics(),
            }
            log.record(step, self.order.epoch_of(step - 1), values)
        self._open_window()

    def _open_window(self) -> None:
        self._window = StepWindow()
        self._meter.restart()
        self._checked_steps = 0

    def _validate(self, progress: Progress, log: MetricsLog | None) -> Progress:
        self.heartbeat.at(progress.step - 1, "validation")
        epoch = self.order.epoch_of(progress.step - 1)
        means = validate(
            self._task, self.strategy, self._validation, self._group, self.order.batch_size, self._validation_cuts
        )
        if log:
            log.record(progress.step, epoch, {"validation": means})
            place = f"step {progress.step}/{self.total_steps}"
            if progress.step % self.order.steps_per_epoch == 0:
                place = f"epoch {epoch + 1}/{self.config.epochs}"
            numbers = ", ".join(f"{name} {value:#.4g}" for name, value in means.items())
            print(f"{place}: validation {numbers}", flush=True)
        self._window.started = time.perf_counter()
        return update_best(progress, means)

    def _save(self, progress: Progress, store: CheckpointStore) -> None:
        self.heartbeat.at(progress.step - 1, "checkpoint")
        self._check_finite(progress.step)
        with self.pauses.measured():
            store.wait()  # the last checkpoint writes the ledger's lines
            commit = self._ledger.collect() if self._ledger else None
            on_complete = partial(self.attempt.checkpoint_written, progress.step) if self.attempt else None
            store.save(self.strategy.state(self._optimizer, progress), commit, on_complete)

    def _is_stale(self, progress: Progress) -> bool:
        return 0 < self.config.early_stopping_patience <= progress.stale_epochs


def _count_slices(config: Train, group: ProcessGroup, order: BatchOrder) -> int:
    """Return the number of slices of each batch; none may be empty."""
    is_exact = config.elastic_shards > 0
    slices = config.elastic_shards if is_exact else group.data_size
    check_order(order, slices, "shards" if is_exact else "processes")
    return slices


def _tokens_per_sample(config: Train, samples: Samples) -> int:
    """Return the length of the rows of `input_ids`; it is needed only for a budget of tokens."""
    if not config.max_tokens:
        return 0
    ids = samples.batch([0]).get(IDS)
    if ids is None or ids.ndim != 2 or samples.has_collate:
        raise ConfigError(
            f"train.max_tokens={config.max_tokens} needs a column `{IDS}` whose rows have one length; to fix it, pack "
            "texts into rows (`pipeline.pack_texts`), or set train.max_steps instead"
        )
    return ids.shape[1]


def update_best(progress: Progress, validation: dict[str, float]) -> Progress:
    """Record the best validation so far, or one more without improvement, also on a best one that was lost."""
    loss, lost = validation["loss"], progress.lost_best
    improves = progress.best_loss is None or loss < progress.best_loss
    if improves:
        progress = replace(progress, best_step=progress.step, best_loss=loss, best_validation=validation)
    if improves and (lost is None or loss < lost["loss"]):
        return replace(progress, stale_epochs=0, lost_best=None)
    return replace(progress, stale_epochs=progress.stale_epochs + 1)


def not_finite_message(quantity: str, step: int, ranks: list[int]) -> str:
    rank_text = "rank " + ", ".join(map(str, ranks))
    return (
        f"the {quantity} is not finite at step {step} on {rank_text}; checkpoints made so far are kept; "
        "to fix it, lower train.lr or set train.clip_norm and go on from the last one "
        "(`pipe run --continue latest train.lr=…`), or check the data of that step"
    )


class CheckpointPauses:
    """How long training paused for checkpoints; they are written while it continues."""

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0  # since this process started
        self._line: list[float] = []  # since the last log line

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        pause = time.perf_counter() - started
        self.count, self.seconds = self.count + 1, self.seconds + pause
        self._line.append(pause)

    def metrics(self) -> dict[str, float]:
        """Return the mean since the last log line; empty without a pause."""
        line, self._line = self._line, []
        return {"checkpoint_seconds": sum(line) / len(line)} if line else {}


_REBALANCE_STEPS = 10  # between two measurements of the speeds
_SMOOTHING = 0.5  # weight of the earlier estimate


class BatchBalance:
    """Slices of a global batch: equal ones, or in proportion to the speed of each process.

    Gradients are weighted by slice size, so they are exact however the batch is cut.
    """

    def __init__(self, kind: Literal["equal", "auto"], group: ProcessGroup, strategy: Strategy) -> None:
        self._group, self._auto = group, kind == "auto" and group.data_size > 1
        self._strategy = strategy
        self.speeds = [1.0] * group.data_size  # samples per second, on any common scale
        self._samples = self._steps = 0
        self._seconds_before = 0.0

    def slice_of(self, count: int) -> range:
        """Return this process's slice of a global batch of `count` samples, or groups."""
        return split_by_speed(count, self.speeds)[self._group.data_rank] if self._auto else self._group.slice_of(count)

    def slices(self, count: int) -> dict[int, range]:
        """Return this process's slices by number; some strategies compute several, one after the other."""
        return {self._group.data_rank: self.slice_of(count)} if self._auto else self._strategy.slices(count)

    def observe(self, count: int) -> None:
        """Record a step with a batch of `count` samples or groups; every few steps the processes exchange speeds."""
        if not self._auto:
            return
        if self._steps == 0:
            self._own_seconds()  # leave out the warm-up and the first step
        else:
            self._samples += len(self.slice_of(count))
        if self._steps and self._steps % _REBALANCE_STEPS == 0:
            speeds = self._group.gather(self._samples / max(self._own_seconds(), 1e-9))
            previous_speeds = self.speeds if self._steps > _REBALANCE_STEPS else speeds
            self.speeds = [
                _SMOOTHING * before + (1 - _SMOOTHING) * now
                for before, now in zip(previous_speeds, speeds, strict=True)
            ]
            self._samples = 0
        self._steps += 1

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return each process's share of the batch; empty where shares are equal by definition."""
        if not self._auto:
            return {}
        return {"batch_share": {f"rank {rank}": speed / sum(self.speeds) for rank, speed in enumerate(self.speeds)}}

    def _own_seconds(self) -> float:
        """Return the seconds of own work since the last call, without waiting for others."""
        self._strategy.stopwatch.collect()
        total, total_before = self._strategy.traffic.compute_seconds, self._seconds_before
        self._seconds_before = total
        return total - total_before


def split_by_speed(count: int, speeds: Sequence[float]) -> list[range]:
    """Cut consecutive slices in proportion to the speeds; none is empty while there is a sample for each."""
    total, least = sum(speeds), 1 if count >= len(speeds) else 0
    remaining = count - least * len(speeds)
    bounds, speed_sum = [0], 0.0
    for i, speed in enumerate(speeds, start=1):
        speed_sum += speed
        bounds.append(least * i + int(remaining * (speed_sum / total) + 1e-9))
    bounds[-1] = count
    return [range(start, stop) for start, stop in itertools.pairwise(bounds)]


class AttemptReporter:
    """The current attempt; its number is the same on every process and unique in the run."""

    def __init__(self, run: Run, number: int, reports: bool) -> None:
        self.number = number
        self._run = run
        self._has_step = self._has_checkpoint = not reports

    def step_done(self, step: int) -> None:
        if not self._has_step:
            self._has_step = True
            record_event(self._run.path, event="step", attempt=self.number, step=step)

    def checkpoint_written(self, step: int) -> None:
        """Record the first checkpoint: another attempt would start from it, not from where this one did."""
        if not self._has_checkpoint:
            self._has_checkpoint = True
            record_event(self._run.path, event="checkpoint", attempt=self.number, step=step)


def begin_attempt(run: Run, group: ProcessGroup, step: int) -> AttemptReporter:
    """Number and record an attempt that continues from the checkpoint of `step`; all processes take part."""
    hosts = group.gather(socket.gethostname())
    number = 0
    if group.rank.first:
        recorded, trained = newest_attempt(read_events(run.path)), last_attempt(run.partial("train") / LEDGER_FILE)
        if recorded < trained:
            print(f"warning: logs/attempts is damaged: it lacks attempt {trained} of the ledger", file=sys.stderr)
        number = 1 + max(recorded, trained)
        clear_passing(run.partial("train"))
    number = group.share(number)
    if group.rank.first:
        record_event(run.path, event="start", attempt=number, processes=group.size, hosts=hosts, step=step)
    return AttemptReporter(run, number, group.rank.first)
