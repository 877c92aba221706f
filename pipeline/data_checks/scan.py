"""Scan a split once, in batches: fingerprint, digests, schema, histograms, and codes for near-duplicates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from pipeline.contract.data import Fingerprint, Samples, batch_digests
from pipeline.contract.task import Classifier, Regressor, Task
from pipeline.data_checks.copies import describe_pictures
from pipeline.data_checks.near_duplicates import (
    Codes,
    Digests,
    FeatureSpace,
    TextColumn,
    find_spaces,
    find_texts,
    group_name,
    number_rows,
    small_pictures,
)
from pipeline.data_checks.profile import (
    LABEL,
    MAX_IDS,
    VALUE,
    ColumnSummary,
    Feature,
    Floats,
    Histogram,
    HistogramBuilder,
    Integers,
    SchemaBuilder,
    choose_features,
    feature_kind,
)
from pipeline.system.errors import DataError

SimilaritySpace: TypeAlias = FeatureSpace | TextColumn  # in which near-duplicates are searched

_PILOT_SAMPLES = 8192  # samples of train that determine the edges of histograms
_MIN_PILOT_SAMPLES = 256
_BATCH_BYTES = 16 << 20  # of a batch


@dataclass(frozen=True)
class ScanPlan:
    """What to scan for, determined from samples of the training split."""

    features: tuple[Feature, ...]
    spaces: tuple[SimilaritySpace, ...]
    pilot: Mapping[str, Tensor]
    rows: int  # in a batch
    notes: tuple[str, ...]
    short: tuple[tuple[str, ...], ...] = ()  # columns of which each sample has few numbers in all

    @property
    def pictures(self) -> list[FeatureSpace]:
        return [space for space in self.spaces if isinstance(space, FeatureSpace) and space.image]


@dataclass(frozen=True)
class SplitSummary:
    """The contents of one split."""

    samples: int
    fingerprint: str
    classes: Mapping[str, int] | None
    digests: Digests  # of the inputs of each sample
    columns: Mapping[str, ColumnSummary]
    histograms: Mapping[str, Histogram]
    champion_histograms: Mapping[str, Histogram]  # of the champion's features
    codes: Mapping[str, Codes] = field(default_factory=dict)  # by the name of the space
    pictures: Mapping[str, Tensor] = field(default_factory=dict)  # descriptions of training pictures, by space
    short: Mapping[str, Floats] = field(default_factory=dict)  # rows of few numbers, by the name of the columns


def plan_scan(task: Task, train: Samples, ignored: Sequence[str], near_duplicates: bool) -> ScanPlan:
    first_sample = train.batch([0])
    size = sum(column.nbytes for column in first_sample.values())
    rows = max(1, min(_PILOT_SAMPLES, _BATCH_BYTES // max(size, 1)))
    pilot = with_label(task, random_samples(train, min(len(train), max(rows, _MIN_PILOT_SAMPLES))))
    columns = _columns_to_check(task, pilot, ignored)
    inputs = [name for name in task.inputs if name not in ignored]
    spaces: list[SimilaritySpace] = []
    short: list[tuple[str, ...]] = []
    notes: list[str] = []
    if near_duplicates:
        if train.has_collate:
            notes = ["near-duplicates are searched in columns of texts only, as collate() may change other shapes"]
        else:
            points, short, notes = find_spaces(pilot, inputs, len(train))
            spaces += points
        spaces += find_texts(pilot, inputs)
    features = tuple(
        _with_classes(task, feature) for feature in choose_features({name: pilot[name] for name in columns})
    )
    return ScanPlan(features, tuple(spaces), pilot, rows, tuple(notes), tuple(short))


def scan_split(task: Task, samples: Samples, plan: ScanPlan, champion_features: Sequence[Feature] = ()) -> SplitSummary:
    fingerprint, schema = Fingerprint(), SchemaBuilder()
    histograms, champion_histograms = HistogramBuilder(plan.features), HistogramBuilder(champion_features)
    digests: list[Digests] = []
    codes: dict[str, list[Codes]] = {space.name: [] for space in plan.spaces}
    pictures: dict[str, list[Tensor]] = {space.name: [] for space in plan.pictures if samples.split == "train"}
    short: dict[str, list[Floats]] = {group_name(columns): [] for columns in plan.short}
    counts = np.zeros(len(task.classes), np.int64) if isinstance(task, Classifier) else None
    for batch, rows in _batches(samples, plan.rows):
        for row in rows:
            fingerprint.add(row)
            digests.append(batch_digests(row, task.inputs))
        schema.add(batch)
        labelled = with_label(task, batch)
        if counts is not None:
            counts += _count_labels(labelled[LABEL], len(counts), samples.split)
        histograms.add(labelled)
        champion_histograms.add(labelled)
        for space in plan.spaces:
            codes[space.name].append(space.codes(batch))
            if space.name in pictures:
                pictures[space.name].append(describe_pictures(small_pictures(batch[space.columns[0]])))
        for columns in plan.short:
            short[group_name(columns)].append(number_rows(batch, columns))
    return SplitSummary(
        samples=len(samples),
        fingerprint=fingerprint.hexdigest(),
        classes=_class_counts(task, counts),
        digests=np.concatenate(digests),
        columns=schema.columns,
        histograms=histograms.histograms(),
        champion_histograms=champion_histograms.histograms(),
        codes={name: np.concatenate(parts) for name, parts in codes.items()},
        pictures={name: torch.cat(parts) for name, parts in pictures.items()},
        short={name: np.concatenate(parts) for name, parts in short.items()},
    )


def _batches(samples: Samples, rows: int) -> Iterator[tuple[dict[str, Tensor], Iterable[dict[str, Tensor]]]]:
    """Yield batches in order, and what to hash of each: single samples where a batch pads them.

    Columns in memory are sliced without copying.
    """
    for start in range(0, len(samples), rows):
        if samples.columns is not None:
            batch = {name: column[start : start + rows] for name, column in samples.columns.items()}
            yield batch, [batch]
            continue
        items = samples.load(range(start, min(start + rows, len(samples))))
        batch = samples.collate(items)
        yield batch, (samples.collate([item]) for item in items) if samples.has_collate else [batch]


def load_rows(samples: Samples, indices: Integers, columns: Sequence[str], rows: int) -> Iterator[dict[str, Tensor]]:
    """Yield these columns of some samples in batches."""
    for start in range(0, len(indices), rows):
        batch = samples.batch(indices[start : start + rows])
        yield {name: batch[name] for name in columns}


def read_histograms(task: Task, samples: Samples, indices: Integers, plan: ScanPlan) -> Mapping[str, Histogram]:
    """Return the histograms of some samples, of at most a few thousand of them."""
    builder, count = HistogramBuilder(plan.features), min(len(indices), _PILOT_SAMPLES)
    indices = np.sort(indices[np.linspace(0, len(indices) - 1, count).astype(np.int64)])
    for start in range(0, count, plan.rows):
        builder.add(with_label(task, samples.batch(indices[start : start + plan.rows])))
    return builder.histograms()


def random_samples(samples: Samples, count: int) -> dict[str, Tensor]:
    """Return a fixed random choice of samples, in order, as the split may be sorted."""
    chosen = np.random.Generator(np.random.PCG64(0)).choice(len(samples), count, replace=False)
    return samples.batch(np.sort(chosen))


def with_label(task: Task, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the batch with the label of each sample, if the task has actual()."""
    if isinstance(task, Classifier):
        return {**batch, LABEL: task.actual(batch).reshape(-1)}
    return {**batch, VALUE: task.actual(batch)} if isinstance(task, Regressor) else dict(batch)


def _columns_to_check(task: Task, pilot: Mapping[str, Tensor], ignored: Sequence[str]) -> list[str]:
    """Return inputs and labels; without actual(), columns that are no inputs count as labels, unless they number."""
    labels = [name for name in (LABEL, VALUE) if name in pilot] or [
        name for name in pilot if name not in task.inputs and not _is_numbering(pilot[name])
    ]
    return [name for name in (*task.inputs, *labels) if name not in ignored]


def _is_numbering(column: Tensor) -> bool:
    """Return whether a column is an integer per sample with many values, as the id of a query, user or row."""
    is_integer = not (column.is_floating_point() or column.is_complex())
    return is_integer and column[0].numel() == 1 and feature_kind(column) == "numbers"


def _with_classes(task: Task, feature: Feature) -> Feature:
    """Return the label's feature with a bin per class, also for classes that the pilot lacks."""
    if feature.column != LABEL or not isinstance(task, Classifier):
        return feature
    ids = feature.ids if len(task.classes) > MAX_IDS else tuple(range(len(task.classes)))
    words = tuple(str(task.classes[i]) if 0 <= i < len(task.classes) else str(i) for i in ids)
    return feature.model_copy(update={"ids": ids, "words": words})


def _count_labels(labels: Tensor, classes: int, split: str) -> Integers:
    if labels.is_floating_point():  # a table with gaps gives floats with NaN
        gaps = int((~labels.isfinite()).sum())
        raise DataError(
            f"data({split!r}): labels are {str(labels.dtype).removeprefix('torch.')}, not integers"
            + (f", and {gaps} of {len(labels)} are missing" if gaps else "")
            + "; to fix it: make actual() return the class index of each sample"
        )
    if len(invalid := labels[(labels < 0) | (labels >= classes)]):
        smallest = int(torch.sort(invalid).values[0])
        raise DataError(f"data({split!r}): label {smallest} is outside the {classes} classes")
    return np.bincount(labels.cpu().numpy().astype(np.int64), minlength=classes)


def _class_counts(task: Task, counts: Integers | None) -> dict[str, int] | None:
    if counts is None or not isinstance(task, Classifier):
        return None
    return {str(name): int(count) for name, count in zip(task.classes, counts, strict=True)}
