"""The reference of the live traffic: distributions of the training data and of the answers, and the promised metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.contract.config import Config
from pipeline.contract.run import Run
from pipeline.data_checks.profile import (
    LABEL,
    ColumnSummary,
    Feature,
    Floats,
    Histogram,
    HistogramBuilder,
    as_ids,
    choose_features,
    feature_values,
    read_profile,
)
from pipeline.statistics.scores import CANDIDATE, PREDICTED, PROBABILITIES, Columns
from pipeline.statistics.sequences import share_limits
from pipeline.system.errors import ConfigError
from pipeline.system.wording import number

# How `monitor.alpha` is divided: false alarms of the metric, of the columns, and by chance in the reference itself.
METRIC_SHARE, DRIFT_SHARE, REFERENCE_SHARE = 0.5, 0.4, 0.1
TOLERANCE = 0.01  # difference of a share that is no drift
_QUANTILES = 10  # of a number, whose shares are tested
_MAX_IDS = 16  # of a column, that are tested one by one
ANSWER, CONFIDENCE = "predicted", "confidence"


@dataclass(frozen=True)
class Promise:
    """What the verdict promised of the metric."""

    metric: str
    value: float
    limit: float  # end of its interval: a test set is a sample, too
    lower: bool  # lower is better
    untested: str = ""  # why it cannot be tested


@dataclass(frozen=True)
class Share:
    """A share of the samples in the reference: a value of [0, 1] per sample, and its mean."""

    text: str
    mean: float
    samples: int


@dataclass(frozen=True)
class Column:
    """A column of inputs or answers whose distribution is tested."""

    kind: str  # "inputs" or "answers"
    name: str
    features: tuple[Feature, ...]
    histograms: tuple[Histogram, ...]
    summary: ColumnSummary | None = None

    @cached_property
    def _cuts(self) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
        return [_choose_cuts(*pair) for pair in zip(self.features, self.histograms, strict=True)]

    @cached_property
    def shares(self) -> list[Share]:
        parts = zip(self.features, self.histograms, self._cuts, strict=True)
        return [share for part in parts for share in _shares(*part)]

    def limits(self, error: float) -> Floats:
        """Return what the live means of the shares, and then of their complements, may be at most."""
        pairs = [share_limits(np.array([each.mean * each.samples]), each.samples, error) for each in self.shares]
        low, high = (np.concatenate(side) for side in zip(*pairs, strict=True))
        return np.minimum(np.concatenate([high, 1 - low]) + TOLERANCE, 1.0)

    def values(self, column: Tensor) -> Floats | None:
        """Return the shares of each sample and their complements; None for samples of another form."""
        if self.summary is not None:
            if tuple(column.shape[1:]) != self.summary.shape:
                return None
            column = column.to(getattr(torch, self.summary.dtype))
        first = self.features[0]
        if first.kind == "ids":
            ids, chosen = as_ids(column), np.asarray(first.ids)[self._cuts[0]]
            each = (ids[:, :, None] == chosen).mean(axis=1)
            values = np.concatenate([each, 1 - each.sum(axis=1, keepdims=True)], axis=1)
        else:
            numbers = feature_values(first.kind, column)
            if numbers.shape[1] != len(self.features):
                return None
            pairs = zip(numbers.T, self.features, self._cuts, strict=True)
            parts = [row[:, None] <= np.asarray(feature.edges)[cuts] for row, feature, cuts in pairs]
            values = np.concatenate(parts, axis=1).astype(np.float64)
        return np.concatenate([values, 1 - values], axis=1)


def _choose_cuts(feature: Feature, histogram: Histogram) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the ids, or the edges about the quantiles and at both ends, whose shares are tested."""
    if feature.kind == "ids":
        return np.sort(np.argsort(-np.asarray(histogram.bins[:-1]), kind="stable")[:_MAX_IDS])
    below = np.cumsum(histogram.bins)[:-1] / max(1, sum(histogram.bins))
    inner = [int(np.abs(below - level).argmin()) for level in np.arange(1, _QUANTILES) / _QUANTILES]
    return np.unique([0, *inner, len(below) - 1])


def _shares(feature: Feature, histogram: Histogram, cuts: np.ndarray[Any, Any]) -> list[Share]:
    bins, samples = np.asarray(histogram.bins, np.float64), histogram.samples
    if feature.kind == "ids":
        names, shares = feature.words or tuple(map(str, feature.ids)), bins / max(bins.sum(), 1)
        of_ids = [Share(f"{feature.name} is {names[i]}", float(shares[i]), samples) for i in cuts]
        return [*of_ids, Share(f"{feature.name} is another", max(0.0, float(1 - shares[cuts].sum())), samples)]
    below = np.cumsum(bins) / max(samples, 1)
    return [Share(f"{feature.name} is at most {number(feature.edges[i])}", float(below[i]), samples) for i in cuts]


@dataclass(frozen=True)
class Reference:
    columns: tuple[Column, ...]
    promise: Promise | None
    labels: Mapping[str, ColumnSummary]  # columns of the data that are no inputs
    notes: tuple[str, ...] = ()


def read_reference(run: Run, config: Config, inputs: Sequence[str], lower: frozenset[str]) -> Reference:
    """Read what the run recorded; `inputs` are those of its bundle."""
    profile = read_profile(run.output("prepare") / "profile.json")
    if profile is None:
        raise ConfigError(f"run {run.id} has no prepare/profile.json that this version reads; monitor another run")
    split = "train" if "train" in profile.columns else "test"
    summaries, columns = profile.columns[split], []
    for name in inputs:
        features = tuple(each for each in profile.features if each.column == name and _has_values(each, split))
        if features and name in summaries:
            histograms = tuple(feature.splits[split] for feature in features)
            columns.append(Column("inputs", name, features, histograms, summaries[name]))
    notes = [f"{name}: prepare has no profile of it" for name in inputs if name not in [each.name for each in columns]]
    path = run.output("evaluate") / "predictions.npz"
    predictions: Columns = dict(np.load(path, allow_pickle=False)) if path.is_file() else {}
    answers = {name.removeprefix(CANDIDATE): values for name, values in predictions.items()}
    for name, column in answer_columns(answers, profile.classes is not None).items():
        described = _describe_answers(name, column, profile.classes)
        columns += [described] if all(any(each.bins) for each in described.histograms) else []
    if not answers:
        notes.append("answers: the task has no predicted(), so they are not compared")
    labels = {name: summary for name, summary in summaries.items() if name not in inputs}
    return Reference(tuple(columns), _read_promise(run, config, predictions, lower), labels, tuple(notes))


def _has_values(feature: Feature, split: str) -> bool:
    return split in feature.splits and any(feature.splits[split].bins)


def answer_columns(columns: Columns, is_classifier: bool) -> dict[str, Tensor]:
    """Return what is compared of the answers: the predicted classes or numbers, and the probability of the class."""
    answers = {}
    if PREDICTED in columns:
        answers[ANSWER] = torch.from_numpy(columns[PREDICTED])
    if is_classifier and PROBABILITIES in columns:
        answers[CONFIDENCE] = torch.from_numpy(columns[PROBABILITIES].max(axis=1))
    return answers


def _describe_answers(name: str, column: Tensor, classes: tuple[str, ...] | None) -> Column:
    is_class = name == ANSWER and classes is not None
    features = choose_features({LABEL if is_class else name: column})
    if is_class and classes is not None:
        words = tuple(classes[i] for i in features[0].ids)
        features = (features[0].model_copy(update={"column": name, "name": name, "words": words}),)
    builder = HistogramBuilder(features)
    builder.add({name: column})
    histograms = builder.histograms()
    return Column("answers", name, features, tuple(histograms[feature.name] for feature in features))


def _read_promise(run: Run, config: Config, predictions: Columns, lower: frozenset[str]) -> Promise | None:
    if not predictions:
        return None
    metric, metrics = config.monitor.metric or str(run.verdict()["metric"]), run.evaluation("metrics.json", "candidate")
    value = metrics["candidate"].get(metric)
    if value is None:
        known = ", ".join(metrics["candidate"])
        raise ConfigError(f"monitor.metric: the verdict of run {run.id} has no {metric}; it has {known}")
    is_lower = metric in lower or metric in metrics.get("lower_is_better", ())
    interval = metrics.get("intervals", {}).get("candidate", {}).get(metric)
    limit = interval[1 if is_lower else 0] if interval else value
    column, untested = predictions.get(CANDIDATE + metric), ""
    if column is None:
        untested = "it is not a mean of values per sample"
    elif not np.isin(column, (0.0, 1.0)).all():
        untested = "its values have no bounds"
    return Promise(metric, value, limit, is_lower, untested)
