"""Training with a parameter server: the weights live in the first process, which applies gradients as they come.

Every process computes whole global batches on its own copy of the weights, and none waits for the slowest. The server
hands out the steps up to the next validation and applies each gradient unless it is too old. It talks to each worker
over a gloo group of these two processes.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.system.errors import DataError, LostContact
from train.checkpoint.store import CheckpointStore
from train.data import LoadRequest
from train.elastic.preemption import preemption_handler
from train.ledger import Ledger
from train.metrics import MetricsLog, peak_memory_bytes
from train.optim import learning_rate, seed_step, set_learning_rate
from train.parallel.base import Traffic
from train.parallel.local_sgd import flatten
from train.parallel.parameter_server import ParameterServerStrategy
from train.process_group import ProcessGroup, is_lost_contact
from train.profiling import StepTracer
from train.state import Progress
from train.trainer import Trainer, not_finite_message


class ParameterServerTrainer(Trainer):
    """A trainer whose unit of work is one global step, computed by one process and applied by the server.

    All processes meet for validation, at least at the end of each epoch, and save a checkpoint. There is none between:
    it would have to contain which steps are in progress, and from which weights.
    """

    MAX_STALENESS = 8  # updates that a gradient may lag behind before it is computed again

    def fit(
        self,
        progress: Progress,
        store: CheckpointStore,
        log: MetricsLog | None,
        tracer: StepTracer | None = None,
        ledger: Ledger | None = None,
    ) -> Progress:
        assert tracer is None, (
            "a timeline shows steps that all processes make together: the configuration rejects it here"
        )
        assert isinstance(self.strategy, ParameterServerStrategy)
        self._weights_server = self.strategy
        self._metrics_log, self._ledger = log, ledger
        self._loader.checksums = ledger.checksums if ledger else None
        self._weights_server.module.train()
        parameters = [parameter for parameter in self._weights_server.model.parameters() if parameter.requires_grad]
        numbers = sum(parameter.numel() for parameter in parameters)
        links = open_links(self._group, self.config.timeout_seconds, numbers, self._weights_server.traffic)
        server = Server(parameters, self._optimizer, self._learning_rate, self.MAX_STALENESS, self._after_update)
        with store, preemption_handler(self._group, self._weights_server.next_sync_step, progress.step) as preemption:
            while progress.step < self.total_steps and not self._is_stale(progress):
                steps = range(progress.step, self._next_validation(progress.step))
                with self._hand_out(server, links, steps) as exchange:
                    self._compute_steps(exchange)
                progress = self._validate(replace(progress, step=steps.stop), log)
                self._save(progress, store)
                if preemption.due_at_barrier(progress.step) and progress.step < self.total_steps:
                    store.wait()
                    raise preemption.eviction_error(progress.step)
        return progress

    @contextlib.contextmanager
    def _hand_out(self, server: Server, links: list[WorkerLink], steps: range) -> Iterator[Exchange]:
        """Hand out steps up to a validation; on the first process it closes when all workers have finished."""
        if not self._group.rank.first:
            yield links[0].exchange
            return
        self._sent_before, self._line_started = self._weights_server.traffic.sent_bytes, time.perf_counter()
        server.open(steps)
        threads = [threading.Thread(target=link.serve, args=(server,), daemon=True) for link in links]
        for thread in threads:
            thread.start()
        yield partial(server.exchange, 0)
        for thread in threads:
            thread.join()  # ends by itself: every wait in it has a timeout
        server.check()

    def _compute_steps(self, exchange: Exchange) -> None:
        work = exchange(None)
        while work is not None:
            result = self._compute(work)
            self.heartbeat.at(work.step, "exchange of weights")
            work = exchange(result)
            if self._ledger and work is not None and work.step == result.step:  # too old, so it was not applied
                self._ledger.discard(result.step)

    def _compute(self, work: Work) -> Result:
        self.heartbeat.at(work.step, "data")
        indices = self.order.batch(work.step)
        batch = self._loader.fetch(LoadRequest(work.step, 0, indices, epoch=self.order.epoch_of(work.step)))
        if self._ledger:
            self._ledger.record(work.step, batch.indices, batch.checksums)
        self.heartbeat.at(work.step, "forward and backward")
        seed_step(self.config.seed, work.step, 0)
        loss, norm, row = self._weights_server.gradient(work.weights, batch.columns)
        self.expert_balance.after_update()
        result = Result(work.step, work.version, len(indices), float(loss), float(norm), row)
        for quantity, value in (("loss", result.loss), ("gradient", result.norm)):
            if not math.isfinite(value):
                raise DataError(not_finite_message(quantity, work.step + 1, [self._group.rank.rank]))
        return result

    def _learning_rate(self, updates: int) -> float:
        return learning_rate(updates, self.total_steps, self.config)

    def _after_update(self, updates: int, tally: Tally) -> bool:
        """Log if a line is due, and return whether it was. Any thread of the server calls this, one at a time."""
        if self.attempt:
            self.attempt.step_done(updates)
        if updates % self.config.log_every and updates != self._next_validation(updates - 1):
            return False
        if self._metrics_log:
            self._metrics_log.record(updates, self.order.epoch_of(updates - 1), self._log_values(updates, tally))
        return True

    def _log_values(self, updates: int, tally: Tally) -> dict[str, Any]:
        now, sent, count = time.perf_counter(), self._weights_server.traffic.sent_bytes, len(tally.staleness)
        seconds, sent_bytes = max(now - self._line_started, 1e-9), sent - self._sent_before
        self._line_started, self._sent_before = now, sent
        return {
            "total_steps": self.total_steps,
            "batch_size": self.order.batch_size,
            "lr": self._learning_rate(updates - 1),
            "loss": tally.loss / tally.samples,
            "grad_norm": tally.norm,
            "samples_per_second": tally.samples / seconds,
            "step_seconds": seconds / count,
            "sent_bytes_per_step": sent_bytes / count,  # by the server
            "memory_mb": peak_memory_bytes(self._group.device) / 2**20,  # of the first process
            "staleness": {"mean": sum(tally.staleness) / count, "max": max(tally.staleness)},
            **self.pauses.metrics(),
            "redone": tally.redone,
            "steps_by_rank": {str(rank): steps for rank, steps in sorted(tally.steps_by_rank.items())},
        }


@dataclass(frozen=True)
class Work:
    """The step a worker computes next."""

    step: int
    version: int  # of the weights: the number of updates applied
    weights: Tensor


@dataclass(frozen=True)
class Result:
    """The gradient of one step."""

    step: int
    version: int
    samples: int
    loss: float  # mean over the samples
    norm: float
    gradient: Tensor


Exchange = Callable[[Result | None], Work | None]  # takes a result and returns the next step


@dataclass
class Tally:
    """Totals since the last log line."""

    loss: float = 0.0  # sum over samples
    samples: int = 0
    norm: float = 0.0  # of the last gradient
    staleness: list[int] = field(default_factory=list)  # updates between reading the weights and applying the gradient
    redone: int = 0  # gradients that were too old
    steps_by_rank: Counter[int] = field(default_factory=Counter)


class Server:
    """Hands out steps and applies gradients; the threads of the workers use it one at a time.

    Every step is handed out once, and again to the same worker, with fresh weights, whenever its gradient
    comes back more than `staleness` updates old. So every step is applied exactly once.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        optimizer: torch.optim.Optimizer,
        rate: Callable[[int], float],
        staleness: int,
        after_update: Callable[[int, Tally], bool],
    ) -> None:
        """`after_update` is called after every update; when it returns true the tally restarts."""
        self._parameters, self._optimizer, self._learning_rate = parameters, optimizer, rate
        self._staleness, self._after_update = staleness, after_update
        self._lock = threading.Lock()
        self._steps: Iterator[int] = iter(())
        self._failure: Exception | None = None
        self._tally = Tally()
        self.updates = 0

    def open(self, steps: range) -> None:
        """Start to hand out these steps; all before them are applied."""
        self._steps, self.updates = iter(steps), steps.start

    def exchange(self, rank: int, result: Result | None) -> Work | None:
        """Take a result and return the next step; None when all steps are handed out."""
        with self._lock:
            self.check()
            if result is not None and self.updates - result.version > self._staleness:
                self._tally.redone += 1
                return Work(result.step, self.updates, flatten(self._parameters).cpu())
            if result is not None:
                self._apply(rank, result)
            step = next(self._steps, None)
            return None if step is None else Work(step, self.updates, flatten(self._parameters).cpu())

    def fail(self, error: Exception) -> None:
        """Make every further exchange raise; the first error is the one reported."""
        with self._lock:
            self._failure = self._failure or error

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _apply(self, rank: int, result: Result) -> None:
        set_learning_rate(self._optimizer, self._learning_rate(self.updates))
        sizes = [parameter.numel() for parameter in self._parameters]
        for parameter, part in zip(self._parameters, torch.split(result.gradient, sizes), strict=True):
            parameter.grad = part.view_as(parameter).to(parameter)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        tally = self._tally
        tally.loss += result.loss * result.samples
        tally.samples += result.samples
        tally.norm = result.norm
        tally.staleness.append(self.updates - result.version)
        tally.steps_by_rank[rank] += 1
        self.updates += 1
        if self._after_update(self.updates, tally):
            self._tally = Tally()


_HEADER_SIZE = 6  # numbers before a tensor: whether one follows, and all fields of `Work` or `Result` but the tensor


class WorkerLink:
    """One end of the connection with `peer`. Each link has a gloo group of its own: threads must not share one."""

    def __init__(self, channel: dist.ProcessGroup, peer: int, numbers: int, traffic: Traffic) -> None:
        self._channel, self._peer, self._numbers, self._traffic = channel, peer, numbers, traffic

    def exchange(self, result: Result | None) -> Work | None:
        """Exchange as the worker."""
        if result is None:
            self._send([], None)
        else:
            self._send([result.step, result.version, result.samples, result.loss, result.norm], result.gradient)
        head, weights = self._receive()
        return None if weights is None else Work(int(head[0]), int(head[1]), weights)

    def serve(self, server: Server) -> None:
        """Serve the worker up to a validation; runs in a thread of its own."""
        try:
            while True:
                head, gradient = self._receive()
                work = server.exchange(self._peer, None if gradient is None else _result(head, gradient))
                if work is None:
                    self._send([], None)
                    return
                self._send([work.step, work.version], work.weights)
        except Exception as error:
            server.fail(self._lost_contact(error) if is_lost_contact(error) else error)

    def _send(self, head: list[float], row: Tensor | None) -> None:
        filled = [float(row is not None), *head]
        self._send_tensor(torch.tensor(filled + [0.0] * (_HEADER_SIZE - len(filled)), dtype=torch.float64))
        if row is not None:
            self._send_tensor(row.cpu())

    def _receive(self) -> tuple[list[float], Tensor | None]:
        header = torch.empty(_HEADER_SIZE, dtype=torch.float64)
        dist.recv(header, self._peer, self._channel)
        has_row, *numbers = header.tolist()
        if not has_row:
            return numbers, None
        row = torch.empty(self._numbers)
        dist.recv(row, self._peer, self._channel)
        return numbers, row

    def _send_tensor(self, tensor: Tensor) -> None:
        dist.send(tensor, self._peer, self._channel)
        self._traffic.sent_bytes += tensor.numel() * tensor.element_size()

    def _lost_contact(self, error: Exception) -> LostContact:
        lost = LostContact(f"rank {self._peer} ended, or sent no gradient within train.timeout_seconds; see the log")
        lost.__cause__ = error
        return lost


def open_links(group: ProcessGroup, seconds: int, numbers: int, traffic: Traffic) -> list[WorkerLink]:
    """Return this process's links: the server has one for every worker, a worker has one; all take part."""
    links = []
    for rank in range(1, group.size):
        channel = dist.new_group([0, rank], timeout=timedelta(seconds=seconds), backend="gloo")
        if group.rank.rank in (0, rank):
            assert isinstance(channel, dist.ProcessGroup)
            links.append(WorkerLink(channel, rank if group.rank.first else 0, numbers, traffic))
    return links


def _result(head: list[float], gradient: Tensor) -> Result:
    step, version, samples, loss, norm = head
    return Result(int(step), int(version), int(samples), loss, norm, gradient)
