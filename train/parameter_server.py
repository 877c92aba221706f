"""Training with a parameter server: every process computes whole global batches, nobody waits for the slowest."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pipeline.spec.errors import DataError
from train.checkpoint import CheckpointStore, Progress
from train.feed import Job
from train.journal import Journal
from train.leaving import listening
from train.ledger import Ledger
from train.link import Desk, Here, Link, make_links
from train.measure import memory_mb
from train.schedule import learning_rate
from train.seeding import seed_step
from train.server import Result, Server, Tally, Work
from train.strategy.served import Served
from train.trace import Tracer
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
        assert isinstance(self.strategy, Served)
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
