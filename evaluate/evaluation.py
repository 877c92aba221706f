"""The work of the evaluate step: predict, gather, judge, write; then let the candidate pass or stop the road."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from evaluate.baseline import Baseline, find_baseline
from evaluate.columns import BASELINE, CANDIDATE, Columns
from evaluate.evidence import Evidence, metrics_body, verdict_body
from evaluate.gate import Verdict, judge, rejection
from evaluate.prediction import candidate_predictor, join, measure
from evaluate.share import device_of, gather, group, share_of
from evaluate.truth import check_labels, truth
from evaluate.worst import worst_body
from pipeline.spec.building import build_model
from pipeline.spec.companions import open_task
from pipeline.spec.data import Samples, check_columns, open_split
from pipeline.spec.digest import digest_file
from pipeline.spec.errors import DataError, GateError, StageError
from pipeline.spec.evaluation import Evaluate
from pipeline.spec.facts import RIVAL, WORST
from pipeline.spec.files import write_json
from pipeline.spec.fingerprint import fingerprint
from pipeline.spec.rank import Rank
from pipeline.spec.run import Run
from pipeline.spec.task import Classifier, Task
from pipeline.spec.weights import load_weights

if TYPE_CHECKING:
    from pipeline.spec.task import Predictor


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
        write_json(run.partial("evaluate") / RIVAL, baseline.origin)
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
