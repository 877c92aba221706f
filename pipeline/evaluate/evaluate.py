"""The work of the evaluate step: predict, gather, judge, write; then let the candidate pass or stop the road.

How processes share the test split: whole batches of one fixed grid each, gathered on the first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from pipeline.contract.data import Samples, check_columns, fingerprint, open_split
from pipeline.contract.errors import ConfigError, DataError, GateError, StageError
from pipeline.contract.facts import CHAMPION, WORST
from pipeline.contract.files import digest_file, write_json
from pipeline.contract.processes import Rank
from pipeline.contract.run import Run
from pipeline.contract.settings.stages import Evaluate
from pipeline.contract.task import Classifier, Task, build_model, open_task
from pipeline.contract.weights import load_weights
from pipeline.evaluate.baseline import Baseline, find_baseline
from pipeline.evaluate.gate import Verdict, judge, rejection
from pipeline.evaluate.predictions import BASELINE, CANDIDATE, Columns, candidate_predictor, join, measure
from pipeline.evaluate.results import Evidence, metrics_body, verdict_body
from pipeline.evaluate.slices import check_labels, truth
from pipeline.evaluate.worst_samples import worst_body

if TYPE_CHECKING:
    from pipeline.contract.task import Predictor


def evaluate(run: Run, root: Path) -> None:
    config, rank = run.config, Rank.from_env()
    weights = run.output("train") / "model.safetensors"
    if not weights.is_file():
        raise StageError(f"{weights}: no trained weights; run the train step first")
    checkpoint = digest_file(weights)
    task = open_task(run, root)
    samples = open_split(task, "test")
    check_columns(task, samples)
    candidate = _load_candidate(task, weights, run, rank)
    baseline = find_baseline(task, samples, run, checkpoint)
    with group(rank, config.train.timeout_seconds):
        share = share_of(rank, len(samples), config.evaluate.batch_size)
        columns = gather(rank, _predict(task, candidate, baseline, samples, share, config.evaluate))
    if columns is None:
        return
    # The other processes are done: reading the whole split again keeps nobody waiting.
    test_fingerprint = _checked_fingerprint(run, samples)
    evidence = _evidence(task, columns, baseline)
    verdict = _judge_and_write(run, evidence, test_fingerprint, checkpoint)
    if baseline is not None and baseline.origin is not None:
        write_json(run.partial("evaluate") / CHAMPION, baseline.origin)
    write_json(run.partial("evaluate") / WORST, worst_body(run, task, samples, evidence, config.evaluate.metric))
    print(f"{verdict.verdict}: {verdict.summary}", flush=True)
    for warning in verdict.warnings:
        print(f"warning: {warning}", flush=True)
    if verdict.verdict == "fail":
        raise GateError(rejection(verdict, run.id))


def _load_candidate(task: Task, weights: Path, run: Run, rank: Rank) -> Predictor:
    device = device_of(run.config.train.device, rank)
    return candidate_predictor(load_weights(build_model(task, run), weights, device), task, device)


def _predict(
    task: Task, candidate: Predictor, baseline: Baseline | None, samples: Samples, share: range, config: Evaluate
) -> Columns:
    """One pass over the share: each batch is read once and given to both."""
    parts = []
    for batch in samples.batches(share, config.batch_size):
        part = _owned(CANDIDATE, measure(task, candidate, batch))
        if baseline is not None:
            part |= _owned(BASELINE, measure(task, baseline.predict, batch))
        parts.append(part | truth(task, batch, config.slices))
    return join(parts)


def _owned(owner: str, columns: Columns) -> Columns:
    return {owner + name: values for name, values in columns.items()}


def _checked_fingerprint(run: Run, samples: Samples) -> str:
    """Judged on the very data that prepare looked at."""
    found = fingerprint(samples)
    recorded = run.output("prepare") / "data.json"
    if recorded.is_file():
        expected = json.loads(recorded.read_text())["splits"]["test"]["fingerprint"]
        if found != expected:
            raise DataError(
                f"data('test') changed since prepare: fingerprint {found[:12]}, recorded {expected[:12]}; "
                "make data() give the same samples each time, or run from prepare again"
            )
    return found


def _evidence(task: Task, columns: Columns, baseline: Baseline | None) -> Evidence:
    classes = task.classes if isinstance(task, Classifier) else None
    if baseline is None:
        return Evidence(columns, None, None, classes)
    return Evidence(columns, baseline.kind, baseline.bundle, classes)


def _judge_and_write(run: Run, evidence: Evidence, test_fingerprint: str, checkpoint: str) -> Verdict:
    config, directory = run.config.evaluate, run.partial("evaluate")
    evidence.check(config)
    check_labels(evidence.columns)
    judged = evidence.judged(config)
    verdict = judge(config, judged)
    np.savez(directory / "predictions.npz", allow_pickle=False, **evidence.columns)
    write_json(directory / "metrics.json", metrics_body(config, evidence, test_fingerprint))
    body = verdict_body(config, evidence, judged, verdict, checkpoint, test_fingerprint)
    write_json(directory / "verdict.json", body)
    return verdict


def share_of(rank: Rank, samples: int, batch_size: int) -> range:
    """The sample indices of this rank: contiguous, each sample in exactly one share, none padded.

    Batches are dealt, not samples: a batch then has the same members however many processes there are,
    and so the same rounding. A rank may get none.
    """
    batches = rank.slice_of(-(-samples // batch_size))
    return range(min(batches.start * batch_size, samples), min(batches.stop * batch_size, samples))


@contextmanager
def group(rank: Rank, timeout_seconds: int) -> Iterator[None]:
    """A gloo group around the work of several processes; one alone needs none."""
    if rank.world_size == 1:
        yield
        return
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_seconds))
    try:
        yield
    finally:
        dist.destroy_process_group()


def gather(rank: Rank, columns: Columns) -> Columns | None:
    """Every share in order of the samples, on the first rank; None on the others."""
    if rank.world_size == 1:
        return columns
    parts: list[Any] | None = [None] * rank.world_size if rank.first else None
    dist.gather_object(columns, parts, dst=0)
    return None if parts is None else join(parts)


def device_of(wanted: str, rank: Rank) -> torch.device:
    """Where the candidate runs; `cuda` that is not there is an error, never a silent CPU."""
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ConfigError("train.device is cuda, but torch sees no GPU here; fix the driver or set train.device=auto")
    if wanted == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", rank.local_rank % torch.cuda.device_count())
