"""The order of samples: which ones form each global batch, as a pure function of (seed, epoch, step).

It does not depend on the number of processes. Prepare records the order of the task (`sample_weights`,
`sample_groups`, `sample_lengths`, or a stream) in data.json and `order.npy`, for training and `pipe verify`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pipeline.contract.settings.stages import Train
from pipeline.system.errors import ConfigError, DataError
from pipeline.system.files import digest_file, read_object

ORDER_FILE = "order.npy"  # of the prepare step: the weight, group or length of each training sample
ORDER_KEY = "order"  # in data.json

Kind = Literal["shuffled", "stream", "weights", "groups", "lengths"]
Indices = np.ndarray[Any, np.dtype[np.int64]]
_SORTED_BATCHES = 50  # batches whose samples are sorted by length together; more would leave less to chance


@dataclass(frozen=True, eq=False)
class BatchOrder:
    """The samples of an epoch, cut into batches.

    `shuffled`: one permutation, in batches whose sizes differ by one at most. `stream`: positions in order. `weights`:
    draws with replacement. `groups`: whole groups, in batches of `batch_size` on average. `lengths`: a permutation in
    which the samples of a batch have similar lengths.
    """

    samples: int
    batch_size: int
    seed: int
    kind: Kind = "shuffled"
    values: np.ndarray[Any, Any] | None = None  # the weight, group or length of each sample

    @property
    def steps_per_epoch(self) -> int:
        if self.kind == "groups":  # an average of at least batch_size, so that this much room for groups is enough
            return max(1, self.samples // self.batch_size)
        return -(-self.samples // self.batch_size)

    @property
    def smallest_batch(self) -> int:
        """Return how many parts the smallest batch can be cut into: samples, or whole groups."""
        if self.kind == "groups":
            assert self.values is not None
            return self.samples // (self.steps_per_epoch * int(np.unique(self.values, return_counts=True)[1].max()))
        return self.samples // self.steps_per_epoch

    @property
    def has_equal_batches(self) -> bool:
        """Return whether batch sizes differ by one at most, in the same way in every epoch."""
        return self.kind != "groups"

    def epoch_of(self, step: int) -> int:
        return step // self.steps_per_epoch

    def batch(self, step: int) -> Indices:
        """Return the sample indices of one global step, counted from 0 over all epochs."""
        start, stop = self._bounds(step)
        return _epoch(self, self.epoch_of(step)).indices[start:stop]

    def size(self, step: int) -> int:
        start, stop = self._bounds(step)
        return stop - start

    def cuts(self, step: int) -> Sequence[int]:
        """Return the positions at which a batch may be cut, with its beginning and end: between samples, or groups."""
        if self.kind != "groups":
            return range(self.size(step) + 1)
        assert self.values is not None
        groups = self.values[self.batch(step)]
        return [0, *(np.flatnonzero(groups[1:] != groups[:-1]) + 1).tolist(), len(groups)]

    def _bounds(self, step: int) -> tuple[int, int]:
        offset, steps = step % self.steps_per_epoch, self.steps_per_epoch
        if self.kind in ("groups", "lengths"):
            bounds = _epoch(self, self.epoch_of(step)).bounds
            return int(bounds[offset]), int(bounds[offset + 1])
        return self.samples * offset // steps, self.samples * (offset + 1) // steps


@dataclass(frozen=True)
class _Epoch:
    indices: Indices
    bounds: Indices  # of the batches; empty where they follow from the number of samples


@lru_cache(maxsize=2)
def _epoch(order: BatchOrder, epoch: int) -> _Epoch:
    # Philox is specified to the bit, so the order is the same on every platform.
    generator = np.random.Generator(np.random.Philox(key=[order.seed, epoch]))
    unset = np.empty(0, np.int64)
    if order.kind == "shuffled":
        return _Epoch(generator.permutation(order.samples), unset)
    if order.kind == "stream":
        return _Epoch(np.arange(order.samples), unset)
    assert order.values is not None
    if order.kind == "weights":
        total = np.cumsum(order.values, dtype=np.float64)
        drawn = np.searchsorted(total, generator.random(order.samples) * total[-1], side="right")
        last = np.flatnonzero(order.values)[-1]  # a product may be rounded up to the total
        return _Epoch(np.minimum(drawn, last).astype(np.int64), unset)
    build = _grouped if order.kind == "groups" else _bucketed
    return build(order.values, order.steps_per_epoch, generator)


def _grouped(groups: np.ndarray[Any, Any], steps: int, generator: np.random.Generator) -> _Epoch:
    """Shuffle the groups; a batch has those that begin in its equal share of the samples."""
    _, number, counts = np.unique(groups, return_inverse=True, return_counts=True)
    by_group = np.argsort(number.reshape(-1), kind="stable")
    first = np.cumsum(counts) - counts
    shuffled = generator.permutation(len(counts))
    sizes = counts[shuffled]
    starts = np.cumsum(sizes) - sizes
    indices = by_group[np.repeat(first[shuffled] - starts, sizes) + np.arange(len(groups))]
    batch = starts * steps // len(groups)
    bounds = np.append(starts, len(groups))[np.searchsorted(batch, np.arange(steps + 1))]
    return _Epoch(indices.astype(np.int64), bounds)


def _bucketed(lengths: np.ndarray[Any, Any], steps: int, generator: np.random.Generator) -> _Epoch:
    """Sort the samples of some batches by length, cut them into batches, and shuffle all batches."""
    samples = generator.permutation(len(lengths))
    bounds = len(lengths) * np.arange(steps + 1) // steps
    for first in range(0, steps, _SORTED_BATCHES):
        part = slice(bounds[first], bounds[min(first + _SORTED_BATCHES, steps)])
        samples[part] = samples[part][np.argsort(lengths[samples[part]], kind="stable")]
    batches = [samples[bounds[i] : bounds[i + 1]] for i in generator.permutation(steps)]
    return _Epoch(np.concatenate(batches), np.cumsum([0, *(len(batch) for batch in batches)]))


def count_steps(config: Train, order: BatchOrder, tokens_per_sample: int = 0) -> int:
    """Return the number of optimizer steps after which training is complete: the smallest of its limits."""
    limits = [config.epochs * order.steps_per_epoch]
    if config.max_steps:
        limits.append(config.max_steps)
    if config.max_tokens:
        epochs, rest = divmod(-(-config.max_tokens // tokens_per_sample), order.samples)
        limits.append(epochs * order.steps_per_epoch - (-rest * order.steps_per_epoch // order.samples))
    return min(limits)


def check_order_values(kind: Kind, values: Any, count: int) -> np.ndarray[Any, Any]:
    """Return what a method of the task returned as an array, after checking it."""
    array = np.asarray(values)
    if array.shape != (count,) or array.dtype.kind not in "iufb":
        raise DataError(
            f"sample_{kind}(): must return one number for each of the {count} training samples; found shape "
            f"{array.shape} of {array.dtype}"
        )
    if kind == "groups" and array.dtype.kind == "f":
        raise DataError("sample_groups(): must return integers, such as the id of each sample's query")
    if kind != "groups" and not (np.isfinite(array).all() and (array >= 0).all() and array.any()):
        raise DataError(f"sample_{kind}(): must return finite numbers, none below 0 and not all 0")
    return array.astype(np.float64 if kind == "weights" else np.int64)


def write_order(kind: Kind, values: np.ndarray[Any, Any] | None, folder: Path) -> dict[str, str]:
    """Write the values of a task's order and return its entry in data.json."""
    if values is None:
        return {"kind": kind}
    np.save(folder / ORDER_FILE, values, allow_pickle=False)
    return {"kind": kind, "digest": digest_file(folder / ORDER_FILE)}


def read_order(folder: Path, batch_size: int, seed: int, most: int) -> BatchOrder:
    """Return the order that prepare recorded, for the first `most` samples; 0: all."""
    report = read_object(folder / "data.json")
    count: int = report["splits"]["train"]["samples"]
    samples = min(most or count, count)
    entry = report.get(ORDER_KEY, {"kind": "shuffled"})
    if "digest" not in entry:
        return BatchOrder(samples, batch_size, seed, entry["kind"])
    path = folder / ORDER_FILE
    if not path.is_file() or digest_file(path) != entry["digest"]:
        raise DataError(f"{path}: missing or changed since prepare; `pipe run all --force prepare` writes it again")
    values = np.load(path, allow_pickle=False)[:samples]
    if entry["kind"] == "weights" and not values.any():
        raise ConfigError(f"train.max_samples={most}: the weights of these samples are all 0; to fix it, use more")
    return BatchOrder(samples, batch_size, seed, entry["kind"], values)


def order_identity(folder: Path) -> dict[str, str]:
    """Return the entry of data.json; a resumed run continues only checkpoints of the same order."""
    entry: dict[str, str] = read_object(folder / "data.json").get(ORDER_KEY, {})
    return {ORDER_KEY: f"{entry['kind']} {entry.get('digest', '')}".strip()} if entry else {}


def check_order(order: BatchOrder, slices: int, unit: str) -> None:
    """Raise ConfigError where a batch may leave one of `slices` without work."""
    if order.smallest_batch >= slices:
        return
    if order.kind == "groups":
        assert order.values is not None
        largest = int(np.unique(order.values, return_counts=True)[1].max())
        raise ConfigError(
            f"train.batch_size={order.batch_size} is too small for {slices} {unit}: the largest group has {largest} "
            f"samples and stays in one batch; to fix it, set train.batch_size={largest * slices} or more, or use fewer "
            "processes"
        )
    raise ConfigError(f"train.batch_size={order.batch_size} leaves some of {slices} {unit} without work")
