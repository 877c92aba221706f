"""Run the evaluate step: predict, gather, decide, write; a rejected candidate stops the pipeline.

Several processes split the test set into whole batches of one fixed grid; the first one gathers the results.
It is started by `python -m pipeline.evaluate RUN [--root ROOT]`, as one process or under torchrun.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from pipeline.contract.bundle import NOT_EVALUATED
from pipeline.contract.codec import load_codec
from pipeline.contract.data import Samples, check_columns, open_split
from pipeline.contract.registry import FIRST_COMPARISON, ComparisonCount, count_comparison
from pipeline.contract.results import CHAMPION, FIGURES, WORST
from pipeline.contract.run import Run, step_main
from pipeline.contract.settings.stages import Evaluate
from pipeline.contract.task import (
    SHARED_FOLDER,
    Classifier,
    Task,
    build_model,
    is_evaluated,
    load_weights,
    open_task,
    served_model,
    serving_form,
)
from pipeline.evaluate.baseline import Baseline, find_baseline
from pipeline.evaluate.codec_check import CodecCheck, check_codec
from pipeline.evaluate.compared_data import (
    SAMPLES_FILE,
    DataOfTest,
    compare_with_champion,
    read_near_copies,
    read_test_data,
)
from pipeline.evaluate.figures import figures_body
from pipeline.evaluate.gate import Verdict, decide, rejection_message
from pipeline.evaluate.results import Results, metrics_body, verdict_body
from pipeline.evaluate.slices import check_slice_labels, label_columns
from pipeline.evaluate.worst_samples import worst_body
from pipeline.statistics.metrics import lower_is_better
from pipeline.statistics.scores import BASELINE, CANDIDATE, Columns, candidate_predictor, join_parts, score_batch
from pipeline.system.errors import ConfigError, DataError, GateError, StageError
from pipeline.system.files import digest_bytes, digest_file, digest_mapping, read_object, write_json
from pipeline.system.processes import Rank

if TYPE_CHECKING:
    from pipeline.contract.task import Predictor


def evaluate(run: Run, root: Path) -> None:
    config, rank = run.config, Rank.from_env()
    weights = run.output("train") / "model.safetensors"
    if not weights.is_file():
        raise StageError(f"{weights}: no trained weights; run the train step first")
    checkpoint = digest_file(weights)
    task = serving_form(open_task(run, root))
    samples = open_split(task, "test")
    check_columns(task, samples)
    if not is_evaluated(task):
        _write_unevaluated(run, samples, checkpoint)
        return
    candidate = _load_candidate(task, weights, run, rank)
    baseline = find_baseline(task, samples, run, checkpoint)
    with process_group(rank, config.train.timeout_seconds):
        shard = shard_range(rank, len(samples), config.evaluate.batch_size)
        columns = gather(rank, score_samples(task, candidate, baseline, samples, shard, config.evaluate))
    if columns is None:
        return
    # The other processes are done, so reading the whole split again delays none of them.
    data = _verify_test_data(run, samples)
    codec = _check_codec(run, root, task, samples, candidate)
    results = _results(task, columns, baseline, data, run)
    copies = read_near_copies(run.output("prepare"))
    results = replace(results, codec=codec, copies=copies, training=_lost_best(run))
    verdict = _decide_and_write(run, results, data, checkpoint)
    if baseline is not None and baseline.champion is not None:
        write_json(run.partial("evaluate") / CHAMPION, baseline.champion)
    worst = worst_body(run, task, samples, results, config.evaluate.metric, candidate)
    write_json(run.partial("evaluate") / WORST, worst)
    if figures := figures_body(columns, results.classes):
        write_json(run.partial("evaluate") / FIGURES, figures)
    print(f"{verdict.verdict}: {verdict.summary}", flush=True)
    for warning in verdict.warnings:
        print(f"warning: {warning}", flush=True)
    if verdict.verdict == "fail":
        raise GateError(rejection_message(verdict, run.id))


def _write_unevaluated(run: Run, samples: Samples, checkpoint: str) -> None:
    summary = "the task has no metrics(), so nothing is known of the quality of its answers"
    facts = {"test_fingerprint": _verify_test_data(run, samples).fingerprint}
    body = {"verdict": NOT_EVALUATED, "metric": "", "margin": 0.0, "samples": len(samples), "rules": []}
    write_json(run.partial("evaluate") / "metrics.json", {"candidate": {}, **facts})
    write_json(
        run.partial("evaluate") / "verdict.json", {**body, "checkpoint": checkpoint, "summary": summary, **facts}
    )
    print(f"{NOT_EVALUATED}; {summary}", flush=True)


def _load_candidate(task: Task, weights: Path, run: Run, rank: Rank) -> Predictor:
    device = choose_device(run.config.train.device, rank)
    model = served_model(task, load_weights(build_model(task, run), weights)).to(device)
    return candidate_predictor(model, task, device)


def score_samples(
    task: Task, candidate: Predictor, baseline: Baseline | None, samples: Samples, shard: range, config: Evaluate
) -> Columns:
    """Score candidate and baseline in one pass: each batch is read once."""
    parts = []
    for batch in samples.batches(shard, config.batch_size):
        part = _add_prefix(CANDIDATE, score_batch(task, candidate, batch))
        if baseline is not None:
            part |= _add_prefix(BASELINE, score_batch(task, baseline.predict, batch))
        parts.append(part | label_columns(task, batch, config.slices))
    return join_parts(parts)


def _add_prefix(owner: str, columns: Columns) -> Columns:
    return {owner + name: values for name, values in columns.items()}


def _verify_test_data(run: Run, samples: Samples) -> DataOfTest:
    """Read the test data again: its fingerprint must be the one that prepare recorded."""
    data = read_test_data(samples)
    actual = data.fingerprint
    recorded = run.output("prepare") / "data.json"
    if recorded.is_file():
        expected = read_object(recorded, "splits", "test", "fingerprint")
        if actual != expected:
            raise DataError(
                f"data('test') changed since prepare: fingerprint {actual[:12]}, recorded {expected[:12]}; "
                "to fix it: make data() return the same samples each time, or run from prepare again"
            )
    return data


def _results(task: Task, columns: Columns, baseline: Baseline | None, data: DataOfTest, run: Run) -> Results:
    named = run.config.evaluate.named_metrics
    classes = task.classes if isinstance(task, Classifier) else None
    kind, bundle = (None, None) if baseline is None else (baseline.kind, baseline.bundle)
    change = None
    if baseline is not None and baseline.champion is not None:
        change = compare_with_champion(data, baseline.test_set, run.runs / baseline.champion["run"])
    return Results(columns, kind, bundle, classes, lower_is_better(task), change, named=named)


def _lost_best(run: Run) -> str:
    """Return a note where the best checkpoint was damaged, so that the model is a later one; empty where it was not."""
    path = run.output("train") / "summary.json"
    summary = read_object(path) if path.is_file() else {}
    if not (lost := summary.get("lost_best")):
        return ""
    return (
        f"the model is of step {summary['best_step']}, because the better checkpoint of step {lost['step']} was "
        "damaged; to fix it: train again with `pipe run --force train`"
    )


def _check_codec(run: Run, root: Path, task: Task, samples: Samples, predict: Predictor) -> CodecCheck:
    reference, files = run.config.codec, run.output("prepare") / SHARED_FOLDER
    return check_codec(task, load_codec(reference, root, files=files), reference, samples, predict, files)


def _decide_and_write(run: Run, results: Results, data: DataOfTest, checkpoint: str) -> Verdict:
    config, directory = run.config.evaluate, run.partial("evaluate")
    results.check(config)
    config = config.in_units_of(results.metrics[config.metric].unit_size)
    if results.kind == "champion":
        config = config.against_champion()
    check_slice_labels(results.columns)
    measurements = results.measurements(config, _count_comparison(run, results, data.fingerprint))
    verdict = decide(config, measurements)
    np.savez(directory / "predictions.npz", allow_pickle=False, **results.columns)
    write_json(directory / "metrics.json", metrics_body(config, results, data.fingerprint))
    np.save(directory / SAMPLES_FILE, data.samples, allow_pickle=False)
    body = verdict_body(config, results, measurements, verdict, checkpoint, data.fingerprint)
    write_json(directory / "verdict.json", body)
    return verdict


def _count_comparison(run: Run, results: Results, fingerprint: str) -> ComparisonCount:
    """Record this comparison and count it; the same predictions count once, however often they are evaluated."""
    if results.kind is None or "evaluate" not in run.read().steps:  # nothing is compared, or it was started by hand
        return FIRST_COMPARISON
    answers = {name: values for name, values in results.columns.items() if name.startswith(CANDIDATE)}
    key = digest_mapping({name: digest_bytes(values.tobytes()) for name, values in answers.items()})
    return count_comparison(run.runs, run.config.registry, fingerprint, key, run.id)


def shard_range(rank: Rank, samples: int, batch_size: int) -> range:
    """Return the sample indices of this rank: contiguous, each sample in exactly one shard, no padding.

    Whole batches are distributed, so that a batch has the same samples, and so the same rounding, for any number of
    processes. A rank may get none.
    """
    batches = rank.slice_of(-(-samples // batch_size))
    return range(min(batches.start * batch_size, samples), min(batches.stop * batch_size, samples))


@contextmanager
def process_group(rank: Rank, timeout_seconds: int) -> Iterator[None]:
    """Open a gloo process group if there are several processes."""
    if rank.world_size == 1:
        yield
        return
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_seconds))
    try:
        yield
    finally:
        dist.destroy_process_group()


def gather(rank: Rank, columns: Columns) -> Columns | None:
    """Return all columns in the order of the samples on the first rank, None on the others."""
    if rank.world_size == 1:
        return columns
    parts: list[Any] | None = [None] * rank.world_size if rank.first else None
    dist.gather_object(columns, parts, dst=0)
    return None if parts is None else join_parts(parts)


def choose_device(setting: str, rank: Rank) -> torch.device:
    """Return the device of the candidate. `cuda` without a GPU is an error, never a silent fallback to the CPU."""
    available = torch.cuda.is_available()
    if setting == "cuda" and not available:
        raise ConfigError("train.device is cuda, but torch sees no GPU; to fix it: set train.device=auto")
    if setting == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", rank.local_rank % torch.cuda.device_count())


def main(argv: Sequence[str]) -> int:
    return step_main("evaluate", evaluate, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
