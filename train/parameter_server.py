"""The weights live in the first process; every process computes on a copy of its own.

Training with a parameter server: every process computes whole global batches, nobody waits for the slowest.

The parameter server: hands out the steps of an epoch, and applies each gradient as it comes unless it is too old.

The wire between the parameter server and one worker: a gloo group of these two processes.
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
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.contract.errors import DataError, LostContact
from train.checkpoint.store import CheckpointStore
from train.data import Job
from train.elastic.preemption import listening
from train.ledger import Ledger
from train.metrics import Journal, memory_mb
from train.optim import learning_rate, seed_step
from train.parallel.base import Traffic
from train.parallel.local_sgd import flat
from train.parallel.parameter_server import ParameterServer
from train.process_group import Group, lost_contact
from train.profiling import Tracer
from train.state import Progress
from train.trainer import Trainer, not_finite


class Asynchronous(Trainer):
    """The unit of work is one global step, computed by one process and applied by the first one as it comes.

    All meet at the end of each epoch, for validation and a checkpoint. Within an epoch none is made: which steps
    are under way, and from which weights, would be part of it.
    """

    def fit(
        self,
        progress: Progress,
        store: CheckpointStore,
        journal: Journal | None,
        tracer: Tracer | None = None,
        ledger: Ledger | None = None,
    ) -> Progress:
        assert tracer is None, "a timeline is of steps that all make together: the configuration refuses it here"
        assert isinstance(self.strategy, ParameterServer)
        self._served = self.strategy
        self._journal, self._ledger = journal, ledger
        self._served.module.train()
        parameters = [parameter for parameter in self._served.model.parameters() if parameter.requires_grad]
        numbers = sum(parameter.numel() for parameter in parameters)
        links = make_links(self._group, self.config.timeout_seconds, numbers, self._served.traffic)
        server = Server(parameters, self._optimizer, self._rate, self.config.staleness, self._updated)
        with store, listening(self._group, self._served.meeting_after, progress.step) as leaving:
            while progress.step < self.total_steps and not self._out_of_patience(progress):
                steps = range(progress.step, progress.step + self.order.steps_per_epoch)
                with self._desk(server, links, steps) as desk:
                    self._work(desk)
                progress = self._end_epoch(replace(progress, step=steps.stop), journal)
                self._save(progress, store)
                if leaving.due_here(progress.step) and progress.step < self.total_steps:
                    store.wait()
                    raise leaving.farewell(progress.step)
        return progress

    @contextlib.contextmanager
    def _desk(self, server: Server, links: list[Link], steps: range) -> Iterator[Desk]:
        """Open for one epoch; on the first process it closes when all workers are through."""
        if not self._group.rank.first:
            yield links[0]
            return
        self._sent_before, self._line_began = self._served.traffic.sent_bytes, time.perf_counter()
        server.open(steps)
        threads = [threading.Thread(target=link.serve, args=(server,), daemon=True) for link in links]
        for thread in threads:
            thread.start()
        yield Here(server)
        for thread in threads:
            thread.join()  # ends by itself: whatever it waits for is given up after timeout_seconds
        server.check()

    def _work(self, desk: Desk) -> None:
        work = desk.trade(None)
        while work is not None:
            result = self._result(work)
            self.watch.at(work.step, "exchange of weights")
            work = desk.trade(result)
            if self._ledger and work is not None and work.step == result.step:  # too old: it was not applied
                self._ledger.refused(result.step)

    def _result(self, work: Work) -> Result:
        self.watch.at(work.step, "data")
        indices = self.order.batch(work.step)
        batch = self._feed.fetch(Job(work.step, 0, indices))
        if self._ledger:
            self._ledger.fed(work.step, indices)
        self.watch.at(work.step, "forward and backward")
        seed_step(self.config.seed, work.step, 0)
        loss, norm, row = self._served.gradient(work.weights, batch)
        self.routing.stepped()
        found = Result(work.step, work.version, len(indices), float(loss), float(norm), row)
        for what, value in (("loss", found.loss), ("gradient", found.norm)):
            if not math.isfinite(value):
                raise DataError(not_finite(what, work.step, [self._group.rank.rank]))
        return found

    def _rate(self, updates: int) -> float:
        return learning_rate(updates, self.total_steps, self.config.lr, self.config.warmup, self.config.schedule)

    def _updated(self, updates: int, tally: Tally) -> bool:
        """Whether a line of the journal is due. Called by any thread of the server, by one at a time."""
        if self.attempt:
            self.attempt.stepped(updates)
        if updates % self.config.log_every and updates % self.order.steps_per_epoch:
            return False
        if self._journal:
            self._journal.record(updates, self.order.epoch_of(updates - 1), self._line(updates, tally))
        return True

    def _line(self, updates: int, tally: Tally) -> dict[str, Any]:
        now, sent, count = time.perf_counter(), self._served.traffic.sent_bytes, len(tally.staleness)
        seconds, sent_bytes = max(now - self._line_began, 1e-9), sent - self._sent_before
        self._line_began, self._sent_before = now, sent
        return {
            "total_steps": self.total_steps,
            "batch_size": self.order.batch_size,
            "lr": self._rate(updates - 1),
            "loss": tally.loss / tally.samples,
            "grad_norm": tally.norm,
            "samples_per_second": tally.samples / seconds,
            "step_seconds": seconds / count,
            "sent_bytes_per_step": sent_bytes / count,  # by the server
            "memory_mb": memory_mb(self._group.device),  # of the first process
            "staleness": {"mean": sum(tally.staleness) / count, "max": max(tally.staleness)},
            **self.pauses.told(),
            "redone": tally.redone,
            "steps_by_rank": {str(rank): steps for rank, steps in sorted(tally.steps_by_rank.items())},
        }


@dataclass(frozen=True)
class Work:
    """What a worker computes next."""

    step: int
    version: int  # updates that made these weights
    weights: Tensor


@dataclass(frozen=True)
class Result:
    """What it found."""

    step: int
    version: int
    samples: int
    loss: float  # mean over the samples
    norm: float
    gradient: Tensor


@dataclass
class Tally:
    """What happened since the last line of the journal."""

    loss: float = 0.0  # sum over samples
    samples: int = 0
    norm: float = 0.0  # of the last gradient
    staleness: list[int] = field(default_factory=list)  # updates between the weights of a gradient and its own
    redone: int = 0  # gradients that were too old
    steps_by_rank: Counter[int] = field(default_factory=Counter)


class Server:
    """Used by a thread for each worker, one at a time.

    Every step of an epoch is handed out once, and once more to the same worker, with fresh weights, whenever its
    gradient comes back more than `staleness` updates old. So every step is applied exactly once.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        optimizer: torch.optim.Optimizer,
        rate: Callable[[int], float],
        staleness: int,
        updated: Callable[[int, Tally], bool],
    ) -> None:
        """`updated` is told of every update; when it returns true the tally starts anew."""
        self._parameters, self._optimizer, self._rate = parameters, optimizer, rate
        self._staleness, self._updated = staleness, updated
        self._lock = threading.Lock()
        self._steps: Iterator[int] = iter(())
        self._failure: Exception | None = None
        self._tally = Tally()
        self.updates = 0

    def open(self, steps: range) -> None:
        """The steps of an epoch; all before them are applied."""
        self._steps, self.updates = iter(steps), steps.start

    def trade(self, rank: int, result: Result | None) -> Work | None:
        """A result for the next step; nothing when all steps of the epoch are handed out."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if result is not None and self.updates - result.version > self._staleness:
                self._tally.redone += 1
                return Work(result.step, self.updates, flat(self._parameters).cpu())
            if result is not None:
                self._apply(rank, result)
            step = next(self._steps, None)
            return None if step is None else Work(step, self.updates, flat(self._parameters).cpu())

    def fail(self, error: Exception) -> None:
        """No further trade succeeds; the first error is the one that is told."""
        with self._lock:
            self._failure = self._failure or error

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _apply(self, rank: int, result: Result) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate(self.updates)
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
        if self._updated(self.updates, tally):
            self._tally = Tally()


_HEAD = 6  # numbers ahead of a row: whether one follows, and all of `Work` or `Result` but its tensor


class Desk(Protocol):
    """Where a worker trades a result for its next step."""

    def trade(self, result: Result | None) -> Work | None: ...


class Here:
    """The desk of the first process, in which the server lives."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def trade(self, result: Result | None) -> Work | None:
        return self._server.trade(0, result)


class Link:
    """One end of a wire; the other end is `peer`. Each wire has a group of its own: threads must not share one."""

    def __init__(self, wire: dist.ProcessGroup, peer: int, numbers: int, traffic: Traffic) -> None:
        self._wire, self._peer, self._numbers, self._traffic = wire, peer, numbers, traffic

    def trade(self, result: Result | None) -> Work | None:
        """The worker's end."""
        if result is None:
            self._send([], None)
        else:
            self._send([result.step, result.version, result.samples, result.loss, result.norm], result.gradient)
        head, weights = self._receive()
        return None if weights is None else Work(int(head[0]), int(head[1]), weights)

    def serve(self, server: Server) -> None:
        """The server's end, for one epoch; runs in a thread of its own."""
        try:
            while True:
                head, gradient = self._receive()
                work = server.trade(self._peer, None if gradient is None else _result(head, gradient))
                if work is None:
                    self._send([], None)
                    return
                self._send([work.step, work.version], work.weights)
        except Exception as error:
            server.fail(self._lost(error) if lost_contact(error) else error)

    def _send(self, head: list[float], row: Tensor | None) -> None:
        filled = [float(row is not None), *head]
        self._hand_over(torch.tensor(filled + [0.0] * (_HEAD - len(filled)), dtype=torch.float64))
        if row is not None:
            self._hand_over(row.cpu())

    def _receive(self) -> tuple[list[float], Tensor | None]:
        head = torch.empty(_HEAD, dtype=torch.float64)
        dist.recv(head, self._peer, self._wire)
        follows, *numbers = head.tolist()
        if not follows:
            return numbers, None
        row = torch.empty(self._numbers)
        dist.recv(row, self._peer, self._wire)
        return numbers, row

    def _hand_over(self, tensor: Tensor) -> None:
        dist.send(tensor, self._peer, self._wire)
        self._traffic.sent_bytes += tensor.numel() * tensor.element_size()

    def _lost(self, error: Exception) -> LostContact:
        found = LostContact(
            f"rank {self._peer} ended, or sent no gradient within train.timeout_seconds; the log tells which"
        )
        found.__cause__ = error
        return found


def make_links(group: Group, seconds: int, numbers: int, traffic: Traffic) -> list[Link]:
    """The ends this process holds: the server's for every worker, or a worker's; all take part."""
    found = []
    for rank in range(1, group.size):
        wire = dist.new_group([0, rank], timeout=timedelta(seconds=seconds), backend="gloo")
        if group.rank.rank in (0, rank):
            assert isinstance(wire, dist.ProcessGroup)
            found.append(Link(wire, rank if group.rank.first else 0, numbers, traffic))
    return found


def _result(head: list[float], gradient: Tensor) -> Result:
    step, version, samples, loss, norm = head
    return Result(int(step), int(version), int(samples), loss, norm, gradient)
