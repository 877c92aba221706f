"""The train step: `torchrun … -m train RUN`, on every process."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.spec import chaos
from pipeline.spec.attempts import read_story
from pipeline.spec.building import build_model
from pipeline.spec.companions import open_task
from pipeline.spec.data import Samples, open_split
from pipeline.spec.errors import DataError
from pipeline.spec.files import write_json
from pipeline.spec.fingerprint import fingerprint
from pipeline.spec.rank import Rank
from pipeline.spec.run import Run
from pipeline.spec.step import run_step
from pipeline.spec.weights import save_weights
from train.agreement import check_splits
from train.attempts import begin
from train.batch_size import decide_batch_size
from train.checkpoint import CheckpointStore
from train.checkpoint.where import place_of
from train.flight import record_exchanges
from train.group import Group, join
from train.heap import forget_what_lasts, keep_freed_memory
from train.journal import Journal
from train.ledger import Ledger
from train.parameter_server import Asynchronous
from train.peril import arm
from train.pretrained.opening import beginning_of
from train.resuming import Found, find, resume
from train.seeding import be_deterministic
from train.snapshot import Mirrors, open_memory
from train.summary import last_line, summarise
from train.trace import Tracer, traced_steps
from train.trainer import Trainer
from train.trap import Trap
from train.validation import check_metrics
from train.watchman import watched


def train(run: Run, root: Path) -> None:
    config = run.config.train
    be_deterministic(config)
    record_exchanges()
    with join(config, Rank.from_env(), run.path) as group, watched(group, run, root, config.timeout_seconds):
        if folder := os.environ.get(chaos.VARIABLE):
            arm(Trap(Path(folder), group))
        task = open_task(run, root)
        splits = [open_split(task, name) for name in ("train", "validation")]
        check_splits(task, splits, group)
        if group.rank.first:
            _check_unchanged(run, splits)
        splits[0] = splits[0].first(config.samples)
        make = partial(build_model, task, run)
        batch_size = decide_batch_size(task, config, group, splits[0], run.partial("train"), make)
        identity = _identity(run, len(splits[0]), batch_size)
        place = place_of(config.checkpoints, run.partial("train"), run.id)
        store = CheckpointStore(place, config.keep_checkpoints, identity, group, config.timeout_seconds)
        mirrors = None
        if config.snapshot == "memory":
            mirrors = Mirrors(open_memory(run), socket.gethostname(), identity, group, config.timeout_seconds)
        found = find(store, mirrors, run.partial("train"), identity, group)
        kind = Asynchronous if config.sync == "parameter_server" and group.size > 1 else Trainer
        with beginning_of(run, root, make, group, resumes=found.saved is not None) as begin:
            trainer = kind(task, run.config, group, splits[0], splits[1], batch_size, begin)
        trainer.mirrors = mirrors
        gate = run.config.evaluate
        check_metrics(task, trainer.strategy, splits[1], group, {gate.metric, *gate.require})
        _fit(trainer, run, group, store, found)


def _identity(run: Run, samples: int, batch_size: int) -> dict[str, Any]:
    """What the order of samples depends on."""
    config = run.config.train
    found: dict[str, Any] = {"samples": samples, "batch_size": batch_size, "seed": config.seed}
    if config.checkpoints and (record := run.read().steps.get("train")):
        found["key"] = record.key  # there, nobody throws away what other sources or settings made
    return found


def _fit(trainer: Trainer, run: Run, group: Group, store: CheckpointStore, found: Found) -> None:
    directory = run.partial("train")
    progress = resume(trainer, found, group)
    journal = Journal(directory, progress.step) if group.rank.first else None
    trainer.attempt = begin(run, group, progress.step)
    ledger = Ledger(directory, group, trainer.order, progress.step, trainer.attempt.number)
    keep_freed_memory()
    forget_what_lasts()
    started = time.perf_counter()
    first_step = progress.step
    try:
        progress = trainer.fit(progress, store, journal, _tracer(trainer, group, directory, progress.step), ledger)
    finally:
        if journal:
            journal.close()
    if group.rank.first:
        weights = store.load(progress.best_step).whole("weights.")
        save_weights(weights, directory / "model.safetensors", progress.best_step)
        summary = summarise(trainer, group, progress, first_step, time.perf_counter() - started)
        story = read_story(run.path)
        summary |= {"restarts": story.restarts, "seconds_lost": story.seconds_lost}
        write_json(directory / "summary.json", summary)
        print(last_line(summary), flush=True)
    if trainer.mirrors:
        trainer.mirrors.remove()


def _tracer(trainer: Trainer, group: Group, directory: Path, start: int) -> Tracer | None:
    if not trainer.config.trace:
        return None
    return Tracer(traced_steps(*trainer.config.trace_steps, start, trainer.total_steps), group, directory)


def _check_unchanged(run: Run, splits: list[Samples]) -> None:
    """The data is still what `prepare` saw; looked at where that is cheap, in memory."""
    report = json.loads((run.output("prepare") / "data.json").read_text())
    for samples in splits:
        expected = report["splits"][samples.split]["fingerprint"]
        if samples.in_memory and fingerprint(samples) != expected:
            raise DataError(
                f"data({samples.split!r}): differs from what prepare saw; data() must give the same samples every time"
            )


if __name__ == "__main__":
    status = run_step("train", train, sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # see group.py: freeing what gloo holds may never return
