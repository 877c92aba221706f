"""Samples of traffic and late labels: Parquet files that the service writes and `pipe monitor` reads.

A folder or an fsspec URL has `samples-*.parquet`, with a row for each instance of a request, and `labels-*.parquet`,
with a row for each `POST /feedback`. Names sort by time. A file appears whole, and never changes.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from pipeline.system.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa  # a service without samples does not need it

Arrays: TypeAlias = Mapping[str, np.ndarray[Any, Any]]
Kind: TypeAlias = Literal["samples", "labels"]

INPUT, OUTPUT = "input.", "output."  # prefixes of the columns with the arrays of an instance, as nested lists
_SUFFIX = ".parquet"


class Sample(NamedTuple):
    """Instances of a request that was answered: all of it, unless their shapes differ."""

    id: str
    time: float  # seconds since the epoch
    bundle: str  # digest
    seconds: float  # from its arrival to its answer
    positions: Sequence[int]  # of these instances in the request
    rows: int  # of all instances of the request
    inputs: Arrays  # one row for each instance
    outputs: Arrays


class Label(NamedTuple):
    """What was right for a request: the label of its only instance, or a list with one for each."""

    id: str
    time: float
    label: str  # JSON


def sample_table(samples: Sequence[Sample]) -> pa.Table:
    """Return a row for each instance, in the order of time; an array that a sample lacks is null."""
    import pyarrow as pa

    alike: dict[object, list[Sample]] = {}  # a table for each sample would take twenty times the memory
    for sample in samples:
        layout = [(name, array.dtype.str, array.shape[1:]) for name, array in _arrays(sample).items()]
        alike.setdefault(tuple(layout), []).append(sample)
    table = pa.concat_tables(map(_rows, alike.values()), promote_options="default")
    return table.sort_by([("time", "ascending"), ("id", "ascending"), ("row", "ascending")]).combine_chunks()


def _arrays(sample: Sample) -> Arrays:
    return {INPUT + name: array for name, array in sample.inputs.items()} | {
        OUTPUT + name: array for name, array in sample.outputs.items()
    }


def _rows(samples: Sequence[Sample]) -> pa.Table:
    import pyarrow as pa

    kinds = {
        "id": pa.string(),
        "rows": pa.int32(),
        "time": pa.float64(),
        "bundle": pa.string(),
        "seconds": pa.float64(),
    }
    owners = np.repeat(np.arange(len(samples)), [len(sample.positions) for sample in samples])
    columns = {name: pa.array([getattr(each, name) for each in samples], kinds[name]).take(owners) for name in kinds}
    columns["row"] = pa.array(np.concatenate([sample.positions for sample in samples]), pa.int32())
    arrays = [_arrays(sample) for sample in samples]
    return pa.table(columns | {name: _nested(np.concatenate([each[name] for each in arrays])) for name in arrays[0]})


def _nested(array: np.ndarray[Any, Any]) -> pa.Array:
    """Return an array as a column: lists of lists where a row has axes of its own."""
    import pyarrow as pa

    flat = array.reshape(-1)
    if array.dtype == object:  # texts
        values = pa.array([value.encode() if isinstance(value, str) else value for value in flat], pa.binary())
    else:
        values = pa.array(np.ascontiguousarray(flat))
    for axis in range(array.ndim - 1, 0, -1):
        size, rows = array.shape[axis], int(np.prod(array.shape[:axis]))
        offsets = pa.array(np.arange(rows + 1, dtype=np.int32) * size)
        values = pa.ListArray.from_arrays(offsets, values)
    return values


def label_table(labels: Sequence[Label]) -> pa.Table:
    import pyarrow as pa

    schema = pa.schema({"id": pa.string(), "time": pa.float64(), "label": pa.string()})
    return pa.Table.from_pylist([label._asdict() for label in labels], schema)


def _moment(seconds: float) -> str:
    return time.strftime("%Y%m%dT%H%M%S", time.gmtime(seconds)) + f"{seconds % 1:.6f}"[1:]


class SampleFolder:
    """The files of samples and labels, in a folder or at an fsspec URL."""

    def __init__(self, where: str) -> None:
        from pyarrow import compute, parquet  # noqa: F401  # slow to load; a service that lacks it does not start

        self.where = where
        self._is_local = "://" not in where
        try:
            if self._is_local:
                from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

                self._files, self._path = LocalFileSystem(), str(Path(where).absolute())
            else:
                from fsspec.core import url_to_fs  # type: ignore[import-untyped]

                self._files, self._path = url_to_fs(where, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"serve.sample_to={where}: {error}; to fix it: use another URL, or a folder") from error

    def write(self, kind: Kind, table: pa.Table) -> int:
        """Write one file, whole or not at all, and return its bytes; a local one is on the disk then."""
        import pyarrow as pa
        from pyarrow import parquet

        sink = pa.BufferOutputStream()
        parquet.write_table(table, sink, compression="zstd", use_dictionary=["id", "bundle"])
        data = sink.getvalue()
        name = f"{self._path}/{kind}-{_moment(time.time())}-{secrets.token_hex(4)}{_SUFFIX}"
        self._files.makedirs(self._path, exist_ok=True)
        if not self._is_local:
            self._files.pipe_file(name, data.to_pybytes())
            return int(data.size)
        aside = Path(self._path, f".{Path(name).name}")
        try:
            with aside.open("wb") as file:
                file.write(data)
                os.fsync(file.fileno())
            aside.rename(name)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        return int(data.size)

    def sizes(self, kind: Kind, since: float = 0.0) -> dict[str, int]:
        """Return the bytes of each file that was written since a time, by its name, oldest first."""
        earliest = f"{kind}-{_moment(since) if since else ''}"
        self._files.invalidate_cache()
        try:
            found = self._files.ls(self._path, detail=True)
        except FileNotFoundError:
            return {}
        names = {str(one["name"]).rstrip("/").rpartition("/")[2]: int(one["size"] or 0) for one in found}
        kept = (name for name in names if name.startswith(f"{kind}-") and name.endswith(_SUFFIX))
        return {name: names[name] for name in sorted(kept) if name >= earliest}

    def read(self, name: str) -> pa.Table | None:
        """Return the rows of a file; None if it was deleted since it was listed."""
        import pyarrow as pa
        from pyarrow import parquet

        try:
            data = self._files.cat_file(f"{self._path}/{name}")
        except FileNotFoundError:
            return None
        # Eight times as fast as read_table() for the file of one label.
        return parquet.ParquetFile(pa.BufferReader(data)).read(use_threads=False)

    def remove(self, name: str) -> bool:
        """Delete a file; return whether it was there."""
        try:
            self._files.rm_file(f"{self._path}/{name}")
        except FileNotFoundError:
            return False
        return True
