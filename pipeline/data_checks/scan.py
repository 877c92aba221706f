"""Reading a split once, in batches, for all that is to be known of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from pipeline.contract.data import Fingerprint, Samples, batch_digests
from pipeline.contract.errors import DataError
from pipeline.contract.task import Classifier, Task
from pipeline.data_checks.near_duplicates import Codes, Digests, Space, Text, spaces_in, texts_in
from pipeline.data_checks.profile import LABEL, MOST_IDS, Facts, Feature, Histogram, Integers, Shapes, Sketch, lay_out

Kin: TypeAlias = Space | Text  # in which samples are near to each other

_PILOT = 8192  # samples that say where histograms have their edges
_FEWEST = 256
_BYTES = 16 << 20  # of samples in memory at once


@dataclass(frozen=True)
class Plan:
    """What to look at, as some samples of the training split suggest."""

    features: tuple[Feature, ...]
    kin: tuple[Kin, ...]
    pilot: Mapping[str, Tensor]
    rows: int  # in a batch
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Reading:
    """What one split is."""

    samples: int
    fingerprint: str
    classes: Mapping[str, int] | None
    digests: Digests  # of each sample's inputs
    facts: Mapping[str, Facts]
    histograms: Mapping[str, Histogram]
    again: Mapping[str, Histogram]  # over the champion's features
    codes: Mapping[str, Codes] = field(default_factory=dict)  # by the name of the kin


def look_ahead(task: Task, train: Samples, ignored: Sequence[str], near: bool) -> Plan:
    first = train.batch([0])
    size = sum(column.nbytes for column in first.values())
    rows = max(1, min(_PILOT, _BYTES // max(size, 1)))
    pilot = _described(task, _some(train, min(len(train), max(rows, _FEWEST))))
    columns = _compared(task, pilot, ignored)
    inputs = [name for name in task.inputs if name not in ignored]
    kin: list[Kin] = []
    notes: list[str] = []
    if near:
        spaces, notes = spaces_in(pilot, inputs, len(train))
        kin = [*spaces, *texts_in(pilot, inputs)]
    features = tuple(_with_classes(task, one) for one in lay_out({name: pilot[name] for name in columns}))
    return Plan(features, tuple(kin), pilot, rows, tuple(notes))


def read(task: Task, samples: Samples, plan: Plan, champions: Sequence[Feature] = ()) -> Reading:
    print_, shapes, sketch, again = Fingerprint(), Shapes(), Sketch(plan.features), Sketch(champions)
    digests: list[Digests] = []
    codes: dict[str, list[Codes]] = {kin.name: [] for kin in plan.kin}
    counts = np.zeros(len(task.classes), np.int64) if isinstance(task, Classifier) else None
    for batch in _batches(samples, plan.rows):
        print_.add(batch)
        digests.append(batch_digests(batch, task.inputs))
        shapes.add(batch)
        whole = _described(task, batch)
        if counts is not None:
            counts += _counted(whole[LABEL], len(counts), samples.split)
        sketch.add(whole)
        again.add(whole)
        for kin in plan.kin:
            codes[kin.name].append(kin.codes(batch))
    return Reading(
        samples=len(samples),
        fingerprint=print_.hexdigest(),
        classes=_named(task, counts),
        digests=np.concatenate(digests),
        facts=shapes.facts(),
        histograms=sketch.histograms(),
        again=again.histograms(),
        codes={name: np.concatenate(found) for name, found in codes.items()},
    )


def _batches(samples: Samples, rows: int) -> Iterator[dict[str, Tensor]]:
    """In order; columns in memory are looked at where they are."""
    if samples.columns is None:
        yield from samples.batches(range(len(samples)), rows)
        return
    for start in range(0, len(samples), rows):
        yield {name: column[start : start + rows] for name, column in samples.columns.items()}


def of_places(samples: Samples, places: Integers, columns: Sequence[str], rows: int) -> Iterator[dict[str, Tensor]]:
    """These columns of some samples, a batch at a time."""
    for start in range(0, len(places), rows):
        batch = samples.batch(places[start : start + rows])
        yield {name: batch[name] for name in columns}


def _some(samples: Samples, count: int) -> dict[str, Tensor]:
    """Chosen at random and always the same, in order: a split may be sorted."""
    chosen = np.random.Generator(np.random.PCG64(0)).choice(len(samples), count, replace=False)
    return samples.batch(np.sort(chosen))


def _described(task: Task, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """With the label a classifier makes of it."""
    label = {LABEL: task.actual(batch).reshape(-1)} if isinstance(task, Classifier) else {}
    return {**batch, **label}


def _compared(task: Task, pilot: Mapping[str, Tensor], ignored: Sequence[str]) -> list[str]:
    """Inputs and labels. What a task without classes learns stands in its other columns; a classifier's are notes."""
    others = [name for name in pilot if name not in task.inputs and name != LABEL]
    labels = [LABEL] if isinstance(task, Classifier) else others
    return [name for name in (*task.inputs, *labels) if name not in ignored]


def _with_classes(task: Task, feature: Feature) -> Feature:
    """A label's bins are the classes, seen in the pilot or not, while there are not too many."""
    if feature.column != LABEL or not isinstance(task, Classifier):
        return feature
    ids = feature.ids if len(task.classes) > MOST_IDS else tuple(range(len(task.classes)))
    words = tuple(str(task.classes[i]) if 0 <= i < len(task.classes) else str(i) for i in ids)
    return feature.model_copy(update={"ids": ids, "words": words})


def _counted(labels: Tensor, classes: int, split: str) -> Integers:
    if labels.is_floating_point():  # with NaN among them, if they were read from a table with gaps
        gaps = int((~labels.isfinite()).sum())
        raise DataError(
            f"data({split!r}): labels are {str(labels.dtype).removeprefix('torch.')}, not whole numbers"
            + (f", and {gaps} of {len(labels)} are missing" if gaps else "")
            + "; make actual() give the index of a class for each sample"
        )
    if len(strange := labels[(labels < 0) | (labels >= classes)]):
        found = int(torch.sort(strange).values[0])
        raise DataError(f"data({split!r}): label {found} is outside the {classes} classes")
    return np.bincount(labels.cpu().numpy().astype(np.int64), minlength=classes)


def _named(task: Task, counts: Integers | None) -> dict[str, int] | None:
    if counts is None or not isinstance(task, Classifier):
        return None
    return {str(name): int(count) for name, count in zip(task.classes, counts, strict=True)}
