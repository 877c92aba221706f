"""The train step: `torchrun … -m train RUN`, on every process.

What training says of itself at its end: `summary.json`, and one line for people.

Where training goes on: at the newest checkpoint that is whole, or at a snapshot in memory that is newer.

Every process must see the same data: compared before the first step, since later it would be wrong in silence.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.contract.attempts import CHAOS_VARIABLE, read_story
from pipeline.contract.data import Samples, check_columns, fingerprint, open_split, sample_digests
from pipeline.contract.errors import BundleError, DataError, StageError
from pipeline.contract.files import digest_parts, write_json
from pipeline.contract.processes import Rank
from pipeline.contract.run import Run, run_step
from pipeline.contract.task import Task, build_model, open_task
from pipeline.contract.weights import save_weights
from train.batch_size import decide_batch_size
from train.chaos_hooks import Trap, arm
from train.checkpoint.in_memory import Mirrors, newest_snapshot, open_memory
from train.checkpoint.load import Saved
from train.checkpoint.storage import place_of
from train.checkpoint.store import CheckpointStore
from train.elastic.attempts import begin
from train.hang_report import record_exchanges
from train.ledger import LEDGER_FILE, Ledger, read_lines
from train.metrics import Journal
from train.optim import be_deterministic, forget_what_lasts, keep_freed_memory
from train.parameter_server import Asynchronous
from train.pretrained.load import beginning_of
from train.process_group import Group, join
from train.profiling import Tracer, traced_steps
from train.state import Progress
from train.trainer import Trainer
from train.validation import check_metrics
from train.watchdog import watched


def train(run: Run, root: Path) -> None:
    config = run.config.train
    be_deterministic(config)
    record_exchanges()
    with join(config, Rank.from_env(), run.path) as group, watched(group, run, root, config.timeout_seconds):
        if folder := os.environ.get(CHAOS_VARIABLE):
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


def summarise(trainer: Trainer, group: Group, progress: Progress, first_step: int, seconds: float) -> dict[str, Any]:
    """`seconds` and the speed are of this process's own steps, not of those before a resume."""
    epochs = (progress.step - first_step) / trainer.order.steps_per_epoch
    return {
        "steps": progress.step,
        "epochs": progress.step // trainer.order.steps_per_epoch,
        "best_step": progress.best_step,
        "best_validation": dict(progress.best_validation),
        "stopped_early": progress.step < trainer.total_steps,
        "world_size": group.size,
        "batch_size": trainer.order.batch_size,
        "precision": trainer.config.precision,
        **trainer.strategy.objective.precision.told(),
        "device": group.device.type,
        "seconds": seconds,
        "checkpoints": trainer.pauses.count,
        "checkpoint_seconds": trainer.pauses.seconds,
        "samples_per_second": epochs * trainer.order.samples / seconds,
    }


def last_line(summary: Mapping[str, Any]) -> str:
    told = (
        f"{summary['steps']} steps in batches of {summary['batch_size']}, "
        f"{summary['samples_per_second']:,.0f} samples/s; best at step {summary['best_step']}"
    )
    if "overflow_steps" not in summary:
        return told
    steps = "1 step" if summary["overflow_steps"] == 1 else f"{summary['overflow_steps']} steps"
    return f"{told}; {steps} skipped for overflow, loss scale {summary['loss_scale']:g}"


class Found(NamedTuple):
    """What there is to go on from; nothing where training begins."""

    saved: Saved | None
    what: str


def find(
    store: CheckpointStore, mirrors: Mirrors | None, directory: Path, identity: Mapping[str, Any], group: Group
) -> Found:
    """All take part and find the same. It is known before a model is made: one that goes on needs no weights."""
    saved = store.newest()
    step = saved.progress.step if saved else 0
    if mirrors is not None:
        snapshot = newest_snapshot(
            mirrors, identity, group, lambda found: found.step > step and _stands(found, store, directory)
        )
        if snapshot is not None:
            return Found(snapshot, "snapshot")
    return Found(saved, "checkpoint")


def resume(trainer: Trainer, found: Found, group: Group) -> Progress:
    """All take part and go on from the same step."""
    progress = Progress() if found.saved is None else found.saved.progress
    if found.saved is not None:
        trainer.restore(found.saved)
        if group.rank.first:
            print(f"resumed from the {found.what} of step {progress.step} of {trainer.total_steps}", flush=True)
    if trainer.mirrors is not None:
        trainer.mirrors.begin(group.share(secrets.token_hex(4)), progress.step)
    return progress


def _stands(progress: Progress, store: CheckpointStore, directory: Path) -> bool:
    """What a snapshot relies on is on the disk: the lines of its steps, and the best checkpoint so far."""
    try:
        lines = read_lines(directory / LEDGER_FILE, growing=True)
        if progress.best_step:
            store.load(progress.best_step)
    except (BundleError, StageError):
        return False
    return bool(lines) and lines[-1].step >= progress.step


_LOOKED_AT = 64  # rows of data in memory whose values are compared


def check_splits(task: Task, splits: Sequence[Samples], group: Group) -> None:
    """The splits are the same everywhere, have what the task names, and a sample for every copy of the model."""
    for samples in splits:
        if difference := disagreement(group.gather(describe(samples))):
            raise DataError(
                f"data({samples.split!r}) differs between processes: {difference}; "
                "it must give the same samples in every process"
            )
        check_columns(task, samples)
        if len(samples) < group.data_size:
            raise DataError(
                f"data({samples.split!r}): {len(samples)} samples for {group.data_size} "
                f"{'processes' if group.model_size == 1 else 'copies of the model'}; lower train.processes"
            )


def describe(samples: Samples) -> dict[str, str]:
    """What can be compared at the price of a few samples."""
    facts = {"its length": str(len(samples))}
    first, last = samples.batch([0]), samples.batch([len(samples) - 1])
    for name in first.keys() | last.keys():
        ends = [
            f"{tuple(end[name].shape[1:])} {end[name].dtype}" if name in end else "missing" for end in (first, last)
        ]
        facts[f"column {name}"] = ends[0] if ends[0] == ends[1] else f"{ends[0]} at first, {ends[1]} at last"
    if samples.in_memory:  # items of a data set may be drawn anew each time they are asked for
        rows = sorted({*(len(samples) * i // _LOOKED_AT for i in range(_LOOKED_AT)), len(samples) - 1})
        chosen = Samples(samples.split, samples.batch(rows))
        facts |= {f"what is in column {name}": digest_parts(sample_digests(chosen, [name]))[:8] for name in first}
    return facts


def disagreement(found: Sequence[Mapping[str, str]]) -> str:
    """The first fact that is not the same for all ranks, with the ranks that hold each value; else nothing."""
    for fact in sorted(set().union(*found)):
        values: dict[str, list[int]] = {}
        for rank, facts in enumerate(found):
            values.setdefault(facts.get(fact, "missing"), []).append(rank)
        if len(values) > 1:
            told = [f"{value} on rank {', '.join(map(str, ranks))}" for value, ranks in values.items()]
            return f"{fact} is {' and '.join(told)}"
    return ""


if __name__ == "__main__":
    status = run_step("train", train, sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # see group.py: freeing what gloo holds may never return
