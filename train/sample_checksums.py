"""Checksums of training samples, with which the ledger proves that a step was given the contents of its samples.

Prepare writes those of some samples, as it reads them. Training computes them from the batches that the model is given.
A checksum covers a few values of every column, spread over the sample.
"""

from __future__ import annotations

import hashlib
import platform
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.contract.data import Samples
from pipeline.system.files import read_object
from train.batch_order import Indices
from train.optim import sample_rng

CHECKSUMS_FILE = "checksums.npy"  # of the prepare step
CHECKSUMS_KEY = "checksums"  # in data.json

_VALUES = 16  # of each column
_IN_MEMORY = 1 << 16  # samples with a checksum, where they are rows of columns
_LOADED = 256  # and where the data set loads each
_LOADS = 3  # of the same samples, to find those that a data set changes at random
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


Mask = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True)
class SampleChecksums:
    """The checksums of samples 0, `stride`, 2 * `stride` and so on, as prepare read them."""

    stride: int
    values: Indices
    machine: str  # floating-point results can differ on another kind
    first_epoch: bool = False  # other epochs have other samples at these positions

    def covered(self, indices: Indices, epoch: int) -> Mask:
        """Return which of these samples have a checksum."""
        if self.first_epoch and epoch > 0:
            return np.zeros(len(indices), bool)
        mask: Mask = (indices % self.stride == 0) & (indices // self.stride < len(self.values))
        return mask

    def digest(self, indices: Indices, epoch: int, found: Indices | None = None) -> str:
        """Return a digest of the checksums in `found`, by default of those that prepare wrote; empty without any."""
        covered = self.covered(indices, epoch)
        if not covered.any():
            return ""
        values = self.values[indices[covered] // self.stride] if found is None else found[covered]
        return hashlib.sha256(values.astype("<i8").tobytes()).hexdigest()

    def of_items(self, items: Sequence[Mapping[str, Any]], indices: Indices, epoch: int) -> Tensor:
        """Return the checksums of loaded samples; 0 for those that are not compared."""
        sums = torch.zeros(len(items), dtype=torch.int64)
        for place in np.flatnonzero(self.covered(indices, epoch)).tolist():
            sums[place] = item_checksum(items[place])
        return sums


def batch_checksums(batch: Mapping[str, Tensor]) -> Tensor:
    """Return one number per sample, on the device of the batch, without waiting for it."""
    return reduce(torch.add, (_column_checksums(name, batch[name].detach()) for name in sorted(batch)))


def _column_checksums(name: str, column: Tensor) -> Tensor:
    if column.is_complex():
        column = torch.view_as_real(column)
    rows = column.reshape(len(column), -1)
    if rows.shape[1] > _VALUES:
        rows = rows[:, :: -(-rows.shape[1] // _VALUES)]
    rows = rows.view(_INTEGERS[column.element_size()])
    return (rows * _factors(name, rows.shape[1], rows.device)).sum(1)  # modulo 2**64


def item_checksum(item: Mapping[str, Any]) -> int:
    """Return the checksum of a sample whose columns may be anything; only numbers and texts count."""
    columns = {name: _as_tensor(value) for name, value in item.items()}
    rows = {name: column[None] for name, column in columns.items() if column is not None}
    return int(batch_checksums(rows)) if rows else 0


def _as_tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value
    array = np.frombuffer(value.encode(), np.uint8) if isinstance(value, str) else np.asarray(value)
    return torch.from_numpy(array.copy()) if array.dtype.kind in "biufc" else None


@lru_cache(maxsize=256)
def _factors(name: str, count: int, device: torch.device) -> Tensor:
    generator = np.random.Generator(np.random.Philox(key=zlib.crc32(name.encode())))
    return torch.from_numpy(generator.integers(-(1 << 63), 1 << 63, count, np.int64) | 1).to(device)


def this_machine() -> str:
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def write_checksums(samples: Samples, folder: Path) -> dict[str, dict[str, Any]]:
    """Write the checksums of some training samples, and return their entry in data.json.

    There is none for a data set that loads the same samples differently each time, as it augments them.
    """
    count = _IN_MEMORY if samples.in_memory else _LOADED
    stride = 1 if samples.is_stream else -(-len(samples) // count)
    indices = np.arange(0, len(samples), stride)[:count]
    loads = []
    for attempt in range(1 if samples.in_memory else _LOADS):
        with sample_rng(attempt, 0, 0, 0):
            loads.append(_load_checksums(samples, indices))
    if any((values != loads[0]).any() for values in loads):
        return {}
    np.save(folder / CHECKSUMS_FILE, loads[0], allow_pickle=False)
    first_epoch = samples.is_stream and hasattr(samples.source, "set_epoch")
    return {CHECKSUMS_KEY: {"stride": stride, "machine": this_machine(), "first_epoch": first_epoch}}


def _load_checksums(samples: Samples, indices: Indices) -> Indices:
    if not samples.has_collate:
        return batch_checksums(samples.batch(indices)).numpy()
    return np.array([item_checksum(item) for item in samples.load(indices)], np.int64)


def read_checksums(folder: Path) -> SampleChecksums | None:
    """Return what prepare wrote to `folder`; None where it found nothing to compare."""
    entry = read_object(folder / "data.json").get(CHECKSUMS_KEY)
    return SampleChecksums(values=np.load(folder / CHECKSUMS_FILE, allow_pickle=False), **entry) if entry else None
