"""The train step, in every training process: `torchrun … -m train RUN`.

All processes check that they see the same data, find where to continue (the newest complete checkpoint), train, and
the first one writes `model.safetensors` and `summary.json`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from pipeline.contract.chaos import CHAOS_VARIABLE
from pipeline.contract.data import Samples, check_columns, fingerprint, open_split, sample_digests
from pipeline.contract.restarts import read_attempts
from pipeline.contract.run import Run, step_main
from pipeline.contract.task import Task, build_model, open_task
from pipeline.system.errors import DataError, StageError
from pipeline.system.files import digest_mapping, digest_parts, read_object, write_json
from pipeline.system.processes import Rank
from pipeline.system.wording import number
from train.batch_order import order_identity, read_order
from train.batch_size import decide_batch_size
from train.chaos_hooks import ChaosHook, install_chaos_hook
from train.checkpoint.format import write_tensors
from train.checkpoint.load import SavedCheckpoint
from train.checkpoint.storage import make_storage
from train.checkpoint.store import CheckpointStore
from train.device.accelerator import configure_accelerator, describe_accelerator
from train.hang_report import enable_flight_recorder
from train.ledger import Ledger
from train.metrics import MetricsLog, peak_memory_bytes
from train.optim import freeze_garbage_collector, sample_rng, set_determinism, tune_malloc
from train.parameter_server import ParameterServerTrainer
from train.pretrained.adapter import ADAPTER_FOLDER, add_adapter, merge_adapter
from train.pretrained.load import open_recorded_weights
from train.pretrained.materialize import BuildModel
from train.process_group import ProcessGroup, explain_device_faults, join_process_group
from train.profiling import FIRST_TRACED_STEP, TRACED_STEPS, StepTracer, traced_steps
from train.sample_checksums import read_checksums, this_machine
from train.state import Progress
from train.trainer import Trainer, begin_attempt
from train.watchdog import run_watchdog


def take_weights(run: Run, root: Path) -> None:
    """Check the pretrained weights and write them as the trained ones, where `train.epochs` is 0."""
    task, cpu = open_task(run, root), torch.device("cpu")
    with open_recorded_weights(run, root, lambda: build_model(task, run), ProcessGroup(Rank(), cpu), False) as create:
        model, materializer = create()
        assert materializer is not None  # the weights come from files
        materializer.materialize(model, cpu)
    weights = {name: weight.detach().clone() for name, weight in model.state_dict().items()}  # tied ones twice
    path = run.partial("train") / "model.safetensors"
    save_file(weights, path, {"step": "0"})
    path.chmod(0o644)  # the next step may run as another user
    print(f"weights as given: {len(weights)} tensors, {sum(weight.numel() for weight in weights.values()):,} numbers")


def train(run: Run, root: Path) -> None:
    """Train a prepared run to its end."""
    if not run.config.trains:
        return take_weights(run, root)
    config = run.config.train
    set_determinism(config)
    enable_flight_recorder()
    with (
        explain_device_faults(rank := Rank.from_env()),
        join_process_group(config, rank, run.path) as group,
        run_watchdog(group, run, root, config.timeout_seconds),
    ):
        configure_accelerator(config, group.device)
        if group.rank.first and group.device.type == "cuda":
            print(describe_accelerator(config, group.device), flush=True)
        if folder := os.environ.get(CHAOS_VARIABLE):
            install_chaos_hook(ChaosHook(Path(folder), group))
        task = open_task(run, root)
        prepared = run.output("prepare")
        splits = [open_split(task, name, prepared) for name in ("train", "validation")]
        check_splits(task, splits, group)
        if group.rank.first:
            _check_matches_prepare(run, splits)
        splits[0] = splits[0].first(config.max_samples)

        def build() -> nn.Module:
            return add_adapter(build_model(task, run), run.config.model)

        probed = _longest_first(splits[0], prepared)
        storage = make_storage(config.checkpoints, run.partial("train"), run.id)
        batch_size = decide_batch_size(task, config, group, probed, run.partial("train"), build, storage)
        order = read_order(prepared, batch_size, config.seed, config.max_samples)
        identity = _identity(run, len(splits[0]), batch_size)
        store = CheckpointStore(storage, config.keep_checkpoints, identity, group, config.timeout_seconds)
        # Before the model is created: with a checkpoint, it needs no weights.
        saved = store.newest()
        if (start := run.read().starting_point) and saved is None:
            raise StageError(
                f"the checkpoint to continue from ({start}) is damaged, or of other data or another batch order; "
                "to fix it: choose an earlier one (`pipe run --continue RUN@STEP`), or train from the beginning"
            )
        resumes = saved is not None
        trainer_class = ParameterServerTrainer if config.strategy == "parameter_server" and group.size > 1 else Trainer
        with open_recorded_weights(run, root, build, group, resumes) as create_model:
            trainer = trainer_class(
                task, run.config, group, splits[0], splits[1], batch_size, create_model, order, resumes
            )
        return _fit(trainer, run, root, group, store, saved, build)


def _longest_first(samples: Samples, prepared: Path) -> Samples:
    """Return the samples with which memory is measured: in batches by length, the longest come together."""
    order = read_order(prepared, 1, 0, len(samples))
    if order.kind != "lengths" or order.values is None:
        return samples
    return samples.rearranged(np.argsort(-order.values, kind="stable").tolist())


def _identity(run: Run, samples: int, batch_size: int) -> dict[str, Any]:
    """Return what the order of samples depends on: this run continues only checkpoints with the same values."""
    config = run.config.train
    identity: dict[str, Any] = {"samples": samples, "batch_size": batch_size, "seed": config.seed}
    identity |= order_identity(run.output("prepare"))
    if config.checkpoints and (record := run.read().steps.get("train")):
        # That folder also keeps checkpoints of other sources or settings.
        identity["key"] = record.checkpoints_key or record.key
    return identity


def _fit(
    trainer: Trainer,
    run: Run,
    root: Path,
    group: ProcessGroup,
    store: CheckpointStore,
    saved: SavedCheckpoint | None,
    build: BuildModel,
) -> None:
    directory = run.partial("train")
    progress = resume(trainer, saved, group, group.share(_validated_on(run) if group.rank.first else ""))
    log = MetricsLog(directory, progress.step, "tensorboard" in run.config.track) if group.rank.first else None
    trainer.attempt = begin_attempt(run, group, progress.step)
    checksums = read_checksums(run.output("prepare"))
    if checksums is not None and checksums.machine != this_machine():
        checksums = None
    ledger = Ledger(directory, group, trainer.order, progress.step, trainer.attempt.number, checksums)
    tune_malloc()
    freeze_garbage_collector()
    started = time.perf_counter()
    steps_before = progress.step
    try:
        progress = trainer.fit(progress, store, log, _tracer(trainer, group, directory, progress.step), ledger)
    finally:
        if log:
            log.close()
    memory = max(group.gather(peak_memory_bytes(group.device)))
    if group.rank.first:
        weights = store.load(progress.best_step).tensors("weights.")
        if run.config.model.adapter != "none":  # later steps know only the model without adapters
            weights = merge_adapter(build, weights, run.config.model, directory / ADAPTER_FOLDER, root)
        write_tensors(directory / "model.safetensors", weights, {"step": str(progress.best_step)})
        summary = summarize(trainer, group, progress, steps_before, time.perf_counter() - started)
        attempts = read_attempts(run.path)
        summary |= {"restarts": attempts.restarts, "seconds_lost": attempts.seconds_lost}
        summary["memory_bytes" if group.device.type == "cuda" else "resident_bytes"] = memory
        write_json(directory / "summary.json", summary)
        print(describe_summary(summary), flush=True)


def _validated_on(run: Run) -> str:
    """Return the digest of what the loss on the validation data depends on, beside the weights."""
    data = read_object(run.output("prepare") / "data.json", "splits", "validation", "fingerprint")
    record = run.read().steps.get("train")
    sources = {} if record is None else {name: it for name, it in record.parts.items() if name.startswith("source:")}
    return digest_mapping({"validation": data, **sources})


def _tracer(trainer: Trainer, group: ProcessGroup, directory: Path, start: int) -> StepTracer | None:
    if not trainer.config.trace:
        return None
    return StepTracer(traced_steps(FIRST_TRACED_STEP, TRACED_STEPS, start, trainer.total_steps), group, directory)


def _check_matches_prepare(run: Run, splits: list[Samples]) -> None:
    """Check the number of samples, and of data in memory, where that is cheap, the fingerprints of `prepare`."""
    recorded = read_object(run.output("prepare") / "data.json", "splits")
    for samples in splits:
        expected = recorded[samples.split]
        if len(samples) != expected["samples"] or (
            samples.in_memory and fingerprint(samples) != expected["fingerprint"]
        ):
            raise DataError(
                f"data({samples.split!r}): differs from what prepare saw; to fix it, make data() return the same "
                "samples every time"
            )


def summarize(
    trainer: Trainer, group: ProcessGroup, progress: Progress, steps_before: int, seconds: float
) -> dict[str, Any]:
    """Return the summary; `seconds` and speed are of the steps since the last resume."""
    epochs = (progress.step - steps_before) / trainer.order.steps_per_epoch
    samples_per_second = epochs * trainer.order.samples / seconds
    return {
        "steps": progress.step,
        "total_steps": trainer.total_steps,
        "epochs": round(progress.step / trainer.order.steps_per_epoch, 2),
        "best_step": progress.best_step,
        "best_validation": dict(progress.best_validation),
        **({"lost_best": dict(progress.lost_best)} if progress.lost_best else {}),
        **({"best_since": progress.best_since} if progress.best_since else {}),
        "stopped_early": progress.step < trainer.total_steps,
        "world_size": group.size,
        "batch_size": trainer.order.batch_size,
        "precision": trainer.strategy.objective.precision.kind,
        **trainer.strategy.objective.precision.metrics(),
        "device": group.device.type,
        "seconds": seconds,
        "checkpoints": trainer.pauses.count,
        "checkpoint_seconds": trainer.pauses.seconds,
        "samples_per_second": samples_per_second,
        **({"mfu": trainer.flops.utilization(samples_per_second)} if trainer.flops else {}),
    }


def describe_summary(summary: Mapping[str, Any]) -> str:
    text = (
        f"{summary['steps']} steps in batches of {summary['batch_size']}, "
        f"{summary['samples_per_second']:,.0f} samples/s; best at step {summary['best_step']}"
    )
    if lost := summary.get("lost_best"):
        text += f" (that of step {lost['step']} was better, but its checkpoint was damaged)"
    if since := summary.get("best_since"):
        text += f" (of those since step {since}, as the validation data or the code had changed)"
    if "overflow_steps" not in summary:
        return text
    steps = "1 step" if summary["overflow_steps"] == 1 else f"{summary['overflow_steps']} steps"
    return f"{text}; {steps} skipped for overflow, loss scale {number(summary['loss_scale'])}"


def resume(trainer: Trainer, saved: SavedCheckpoint | None, group: ProcessGroup, validated_on: str) -> Progress:
    """Restore the state and return its progress; all take part.

    Losses on other data, or by other code, cannot be compared: then the best begins again.
    """
    if saved is None:
        return Progress(validated_on=validated_on)
    trainer.restore(saved)
    progress = saved.progress
    changed = bool(progress.best_step or progress.lost_best) and progress.validated_on not in ("", validated_on)
    if group.rank.first:
        print(f"resumed from the checkpoint of step {progress.step} of {trainer.total_steps}", flush=True)
        if changed:
            print("the validation data or the code changed: the best is chosen from this step on", flush=True)
    if changed:
        progress = Progress(progress.step, best_since=progress.step)
    progress = replace(progress, validated_on=validated_on)
    if changed or (progress.lost_best and not progress.best_step):
        return trainer.choose_best_again(progress)
    return progress


_COMPARED_ROWS = 64  # of data in memory


def check_splits(task: Task, splits: Sequence[Samples], group: ProcessGroup) -> None:
    """Check that the splits are equal on all processes, complete, and large enough for every copy of the model."""
    for samples in splits:
        if difference := first_disagreement(group.gather(describe_samples(samples))):
            raise DataError(
                f"data({samples.split!r}) differs between processes: {difference}; "
                "to fix it, make data() return the same samples in every process"
            )
        check_columns(task, samples)
        if len(samples) < group.data_size:
            raise DataError(
                f"data({samples.split!r}): {len(samples)} samples for {group.data_size} "
                f"{'processes' if group.model_size == 1 else 'copies of the model'}; to fix it, lower train.processes"
            )


def describe_samples(samples: Samples) -> dict[str, str]:
    """Return facts that can be compared at the cost of loading a few samples."""
    facts = {"its length": str(len(samples))}
    first_sample, last_sample = (samples.batch([index]) for index in samples.ends)
    for name in first_sample.keys() | last_sample.keys():
        descriptions = [
            f"{tuple(end[name].shape[1:])} {end[name].dtype}" if name in end else "missing"
            for end in (first_sample, last_sample)
        ]
        facts[f"column {name}"] = (
            descriptions[0]
            if descriptions[0] == descriptions[1]
            else f"{descriptions[0]} at first, {descriptions[1]} at last"
        )
    if samples.in_memory or samples.is_stream:  # items of a data set may be random
        rows = sorted({*(len(samples) * i // _COMPARED_ROWS for i in range(_COMPARED_ROWS)), len(samples) - 1})
        with sample_rng(0, 0, 0, 0):  # the order of a stream must be the same, whatever its samples draw
            selected = Samples(samples.split, samples.batch(samples.ends if samples.is_stream else rows))
        facts |= {
            f"the content of column {name}": digest_parts(sample_digests(selected, [name]))[:8] for name in first_sample
        }
    return facts


def first_disagreement(by_rank: Sequence[Mapping[str, str]]) -> str:
    """Return the first fact that differs between ranks, with the ranks of each value; empty if none does."""
    for fact in sorted(set().union(*by_rank)):
        values: dict[str, list[int]] = {}
        for rank, facts in enumerate(by_rank):
            values.setdefault(facts.get(fact, "missing"), []).append(rank)
        if len(values) > 1:
            parts = [f"{value} on rank {', '.join(map(str, ranks))}" for value, ranks in values.items()]
            return f"{fact} is {' and '.join(parts)}"
    return ""


def main(argv: Sequence[str]) -> int:
    return step_main("train", train, argv)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # freeing gloo's resources may never return
