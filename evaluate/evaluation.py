"""The work of the evaluate step: predict, gather, judge, write; then let the candidate pass or stop the road."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from evaluate.baseline import Baseline, find_baseline
from evaluate.evidence import ACTUAL, BASELINE, CANDIDATE, Evidence, means, metrics_body, verdict_body
from evaluate.gate import Verdict, judge, rejection
from evaluate.prediction import Columns, candidate_predictor, classes_of, count_of, join, measure
from evaluate.share import device_of, gather, group, share_of
from pipeline.spec.config import Config
from pipeline.spec.data import Samples, check_columns, open_split
from pipeline.spec.digest import digest_file
from pipeline.spec.errors import DataError, GateError, StageError
from pipeline.spec.files import write_json
from pipeline.spec.fingerprint import fingerprint
from pipeline.spec.rank import Rank
from pipeline.spec.run import Run
from pipeline.spec.task import Classifier, Task, load_task
from pipeline.spec.weights import load_weights

if TYPE_CHECKING:
    from pipeline.spec.task import Batch, Predictor


def evaluate(run: Run, root: Path) -> None:
    config, rank = run.config, Rank.from_env()
    weights = run.output("train") / "model.safetensors"
    if not weights.is_file():
        raise StageError(f"{weights}: no trained weights; run the train step first")
    checkpoint = digest_file(weights)
    task = load_task(config.task, root)
    samples = open_split(task, "test")
    check_columns(task, samples)
    candidate = _load_candidate(task, weights, config, rank)
    baseline = find_baseline(task, samples, run.runs, checkpoint, config.evaluate.seed)
    with group(rank, config.train.timeout_seconds):
        share = share_of(rank, len(samples), config.evaluate.batch_size)
        columns = gather(rank, _predict(task, candidate, baseline, samples, share, config.evaluate.batch_size))
    if columns is None:
        return
    # The other processes are done: reading the whole split again keeps nobody waiting.
    test_fingerprint = _checked_fingerprint(run, samples)
    verdict = _judge_and_write(run, _evidence(task, columns, baseline), test_fingerprint, checkpoint)
    print(f"{verdict.verdict}: {verdict.summary}", flush=True)
    if verdict.verdict == "fail":
        raise GateError(rejection(verdict))


def _load_candidate(task: Task, weights: Path, config: Config, rank: Rank) -> Predictor:
    device = device_of(config.train.device, rank)
    return candidate_predictor(load_weights(task.model(), weights, device), task, device)


def _predict(
    task: Task, candidate: Predictor, baseline: Baseline | None, samples: Samples, share: range, batch_size: int
) -> Columns:
    """One pass over the share: each batch is read once and given to both."""
    parts = []
    for batch in samples.batches(share, batch_size):
        part = _owned(CANDIDATE, measure(task, candidate, batch))
        if baseline is not None:
            part |= _owned(BASELINE, measure(task, baseline.predict, batch))
        parts.append(part | _actual(task, batch))
    return join(parts)


def _owned(owner: str, columns: Columns) -> Columns:
    return {owner + name: values for name, values in columns.items()}


def _actual(task: Task, batch: Batch) -> Columns:
    if not isinstance(task, Classifier):
        return {}
    return {ACTUAL: classes_of(task, "actual", task.actual(batch), count_of(batch))}


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
    evidence.check(config.metric)
    difference = evidence.difference(config)
    baseline = None if evidence.baseline is None else means(evidence.baseline)
    verdict = judge(config, means(evidence.candidate), baseline, difference)
    np.savez(directory / "predictions.npz", allow_pickle=False, **evidence.columns)
    write_json(directory / "metrics.json", metrics_body(evidence, test_fingerprint))
    write_json(directory / "verdict.json", verdict_body(config, evidence, difference, verdict, checkpoint))
    return verdict
