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
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pipeline.contract.bundle import NOT_EVALUATED
from pipeline.contract.codec import load_codec
from pipeline.contract.data import Samples, check_columns, open_split
from pipeline.contract.registry import FIRST_COMPARISON, ComparisonCount, count_comparison
from pipeline.contract.results import CHAMPION, FIGURES, WORST, finite_or_none
from pipeline.contract.run import Run, step_main
from pipeline.contract.settings.stages import Evaluate
from pipeline.contract.task import (
    SHARED_FOLDER,
    Classifier,
    Predictor,
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
from pipeline.evaluate.gate import Verdict, decide, rejection_message
from pipeline.evaluate.results import Results, metrics_body, verdict_body
from pipeline.evaluate.slices import check_slice_labels, label_columns
from pipeline.evaluate.worst_samples import worst_body
from pipeline.statistics.metrics import lower_is_better, query_metrics
from pipeline.statistics.scores import (
    ACTUAL,
    BASELINE,
    CANDIDATE,
    PREDICTED,
    PROBABILITIES,
    QUERY,
    Array,
    Columns,
    candidate_predictor,
    join_parts,
    score_batch,
)
from pipeline.system.errors import ConfigError, DataError, GateError, StageError
from pipeline.system.files import digest_bytes, digest_file, digest_mapping, read_object, write_json
from pipeline.system.processes import Rank


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


_MAX_CURVES, _MAX_CURVE_POINTS = 10, 150  # of classes against the rest
_MAX_POINTS = 400  # of the samples, drawn at random
_RESIDUAL_BINS, _NDCG_BINS = 30, 10
_DECILES = 10
_WORST_QUERIES = 10


def figures_body(columns: Columns, classes: Sequence[str] | None) -> dict[str, Any]:
    """Return the content of figures.json; it is empty for a task without predicted(), or without probabilities()."""
    if ACTUAL not in columns or CANDIDATE + PREDICTED not in columns:
        return {}
    if classes is not None and CANDIDATE + PROBABILITIES in columns:
        curves = list(_classification_curves(columns, classes))
        return {"classification": {"classes": list(classes), "curves": curves}} if curves else {}
    if classes is not None:
        return {}
    if columns[ACTUAL].ndim > 1:  # drawn from metrics.json
        return {}
    if QUERY in columns:
        return {"ranking": _ranking_body(columns)}
    return {"regression": _regression_body(columns)}


def _classification_curves(columns: Columns, classes: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the ROC and precision-recall curves of the second of two classes, or of each class against the rest."""
    actual = columns[ACTUAL]
    counts = np.bincount(actual, minlength=len(classes))
    present = [int(i) for i in np.argsort(-counts, kind="stable") if 0 < counts[i] < len(actual)]
    indices = [i for i in present if i == 1] if len(classes) == 2 else sorted(present[:_MAX_CURVES])
    for owner in (CANDIDATE, BASELINE) if len(classes) == 2 else (CANDIDATE,):
        if owner + PROBABILITIES not in columns:
            continue
        probabilities = columns[owner + PROBABILITIES]
        for i in indices:
            curve = _curve(probabilities[:, i], columns[owner + PREDICTED] == i, actual == i)
            yield {"class": str(classes[i]), "model": owner.rstrip("."), "positives": int(counts[i]), **curve}


def _curve(scores: Array, is_predicted: Array, is_positive: Array) -> dict[str, Any]:
    """Return the curves over all thresholds, and the point where the model decides."""
    order = np.argsort(-scores, kind="stable")
    last = np.flatnonzero(np.append(scores[order][1:] != scores[order][:-1], True))  # of samples with equal scores
    found, wrong = np.cumsum(is_positive[order])[last], np.cumsum(~is_positive[order])[last]
    positives, negatives = int(is_positive.sum()), int((~is_positive).sum())
    tpr, fpr, precision = found / positives, wrong / negatives, found / (found + wrong)
    x, y = np.append(0.0, fpr), np.append(0.0, tpr)
    chosen = int((is_predicted & is_positive).sum())
    taken = int(is_predicted.sum())
    return {
        "auc": float(((x[1:] - x[:-1]) * (y[1:] + y[:-1]) / 2).sum()),
        "average_precision": float((np.diff(y) * precision).sum()),
        "roc": _thinned(x, y, x + y),
        "pr": _thinned(tpr, precision, tpr),
        "decision": {
            "tpr": chosen / positives,
            "fpr": (taken - chosen) / negatives,
            "precision": chosen / taken if taken else None,
        },
    }


def _thinned(x: Array, y: Array, position: Array) -> list[list[float]]:
    """Return at most some hundred points, at even distances of an ascending position; the first and last are kept."""
    indices = np.searchsorted(position, np.linspace(position[0], position[-1], _MAX_CURVE_POINTS))
    unique = np.unique(np.append(indices.clip(max=len(x) - 1), [0, len(x) - 1]))
    points: list[list[float]] = np.stack([x[unique], y[unique]], axis=1).round(5).tolist()
    return points


def _regression_body(columns: Columns) -> dict[str, Any]:
    actual, predicted = columns[ACTUAL], columns[CANDIDATE + PREDICTED]
    finite = np.isfinite(predicted)
    baseline = columns.get(BASELINE + PREDICTED)
    chosen = np.random.default_rng(0).permutation(np.flatnonzero(finite))[:_MAX_POINTS]
    return {
        "samples": len(actual),
        "not_finite": int((~finite).sum()),
        "points": np.stack([actual[chosen], predicted[chosen]], axis=1).tolist(),
        "residuals": _histogram((predicted - actual)[finite]),
        "deciles": _deciles(actual[finite], predicted[finite], None if baseline is None else baseline[finite]),
    }


def _histogram(residuals: Array) -> dict[str, Any] | None:
    """Return counts in bins of equal width; the outer bins have the residuals beyond them too."""
    if not len(residuals):
        return None
    low, high = np.quantile(residuals, (0.005, 0.995))
    pad = 0.0 if high > low else abs(high) * 0.01 or 1.0  # all are equal
    counts, edges = np.histogram(residuals.clip(low, high), _RESIDUAL_BINS, (low - pad, high + pad))
    beyond = int(((residuals < low) | (residuals > high)).sum())
    return {"low": edges[0], "high": edges[-1], "counts": counts.tolist(), "beyond": beyond, "mean": residuals.mean()}


def _deciles(actual: Array, predicted: Array, baseline: Array | None) -> list[dict[str, Any]]:
    """Return the errors of equal parts of the samples in the order of their true value."""
    order = np.argsort(actual, kind="stable")
    groups = [part for part in np.array_split(order, _DECILES) if len(part)]
    return [
        {
            "low": float(actual[part[0]]),
            "high": float(actual[part[-1]]),
            "samples": len(part),
            "mae": finite_or_none(np.abs(predicted[part] - actual[part]).mean()),
            "bias": finite_or_none((predicted[part] - actual[part]).mean()),
            "baseline_mae": None if baseline is None else finite_or_none(np.abs(baseline[part] - actual[part]).mean()),
        }
        for part in groups
    ]


def _ranking_body(columns: Columns) -> dict[str, Any]:
    queries, relevance = columns[QUERY], columns[ACTUAL]
    ids, place = np.unique(queries, return_inverse=True)
    ndcg = {owner: _ndcg(columns, owner) for owner in (CANDIDATE, BASELINE) if owner + PREDICTED in columns}
    candidate = ndcg[CANDIDATE]
    items, relevant = np.bincount(place), np.bincount(place, weights=relevance > 0)
    first_ranks = _first_relevant_ranks(place, columns[CANDIDATE + PREDICTED], relevance)
    order = np.argsort(candidate, kind="stable")
    worst = [int(i) for i in order[: min(_WORST_QUERIES, int(np.isfinite(candidate).sum()))]]  # NaN are the last
    return {
        "queries": len(ids),
        "without_relevant": int((relevant == 0).sum()),
        "histogram": {
            owner.rstrip("."): np.histogram(values[np.isfinite(values)], _NDCG_BINS, (0, 1))[0].tolist()
            for owner, values in ndcg.items()
        },
        "worst": [
            {
                "query": int(ids[i]),
                "ndcg": float(candidate[i]),
                "baseline": finite_or_none(ndcg[BASELINE][i]) if BASELINE in ndcg else None,
                "items": int(items[i]),
                "relevant": int(relevant[i]),
                "first_relevant_rank": int(first_ranks[i]),
            }
            for i in worst
        ],
    }


def _ndcg(columns: Columns, owner: str) -> Array:
    scores = columns[owner + PREDICTED]
    values: Array = query_metrics(columns[QUERY], scores, columns[ACTUAL])["ndcg"]
    if np.isfinite(scores).all():
        return values
    broken = np.unique(columns[QUERY][~np.isfinite(scores)])
    return np.where(np.isin(np.unique(columns[QUERY]), broken), np.nan, values)


def _first_relevant_ranks(place: Array, scores: Array, relevance: Array) -> Array:
    """Return the rank of each query's first relevant item, from 1; the last one of tied scores."""
    scores = np.nan_to_num(scores, nan=-np.inf, posinf=np.inf, neginf=-np.inf)
    best = np.full(place.max() + 1, -np.inf)
    np.maximum.at(best, place[relevance > 0], scores[relevance > 0])
    ranks: Array = np.bincount(place, weights=(scores >= best[place]) & (relevance <= 0)).astype(int) + 1
    return ranks


def main(argv: Sequence[str]) -> int:
    return step_main("evaluate", evaluate, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
