"""Predict every row of a file or folder without a service, on all cores, with the functions that answer requests.

The input is cut into parts, and a part into batches; their bounds depend on the bundle and the input alone. A batch is
computed as a request with these instances is. Parts are written to the folder `OUT.parts`, and joined when all are
there: what is in the folder is not computed again, and shards on several machines may share it.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import itertools
import json
import math
import multiprocessing
import os
import queue
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.context import ForkProcess as Worker
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv, parquet

from pipeline.contract.bundle import Bundle
from pipeline.contract.codec import Arrays, Part, in_order, join_equal_shapes
from pipeline.contract.golden import null_for_nan
from pipeline.contract.signature import NUMPY_TYPES, Signature
from pipeline.system.errors import (
    ConfigError,
    DataError,
    Interrupted,
    InvalidPayload,
    PipelineError,
    StageError,
    disk_full,
)
from pipeline.system.files import digest_parts, read_object, sync, write_atomic, write_json
from pipeline.system.processes import describe_exit
from serve.limits import divide
from serve.options import usable_cores
from serve.protocol import v1
from serve.protocol.tensors import InferRequest, Tensor
from serve.protocol.validate import check_missing

if TYPE_CHECKING:
    from serve.runtime.predictor import Predictor  # ONNX Runtime is loaded after forks, as it starts a thread

FORMATS = (".parquet", ".jsonl", ".csv")  # of outputs
_BATCH_BYTES = 256 << 10  # of input tensors; below it a batch is larger than those that the service merges
_PART_BATCHES, _SMALL_PART_BATCHES, _PART_ROWS = 16, 64, 512  # of a part, at least
_PART_BYTES = 4 << 20  # of the input, about: a process has two parts in memory
_SAMPLE_BYTES = 64 << 10  # at the beginning of a file, by which its rows are measured
_ALONE_SECONDS = 0.1  # before others get work, which takes as long to load the model
_WAITING_PARTS = 2  # of a worker: the one it computes, and the next
_JSON = "json"  # column of parts

Report = Callable[[int, int | None], None]  # rows that are done, and all rows if that is known
Needed = Callable[[int], bool]  # whether a part has to be computed


@dataclass(frozen=True)
class Request:
    bundle: Bundle
    source: Path
    output: Path
    processes: int = 0  # 0: one for each usable core
    shard: tuple[int, int] = (1, 1)  # its number, from 1, and their count
    overwrite: bool = False


def predict(request: Request, report: Report = lambda _rows, _all: None) -> dict[str, Any]:
    """Return the number of rows, and the output, which is None while other shards compute."""
    started_at = time.monotonic()
    _check(request)
    source = open_source(request.source)
    pa.set_memory_pool(pa.system_memory_pool())  # the default one keeps more of what is free
    with _forked((request.processes or usable_cores()) - 1) as workers:  # before this one has threads
        result = _predict(request, source, workers, report)
    return {**result, "seconds": round(time.monotonic() - started_at, 3), "bundle": request.bundle.digest}


def _predict(request: Request, source: Source, workers: Mapping[Connection, Worker], report: Report) -> dict[str, Any]:
    from serve.runtime.loading import load_predictor
    from serve.runtime.session import CPU

    bundle, output, (number, count) = request.bundle, request.output, request.shard
    threads = bundle.signature.runtime.threads or divide(usable_cores(), len(workers) + 1)
    predictor = load_predictor(bundle, threads=threads)
    if predictor.session.provider != CPU and not request.processes:
        workers = {}
    batch_rows = largest_batch(predictor)
    is_small = batch_rows > bundle.signature.runtime.batch_rows
    batches = max(_SMALL_PART_BATCHES if is_small else _PART_BATCHES, _PART_ROWS // batch_rows)
    part_rows = batch_rows * max(1, min(batches, int(_PART_BYTES / max(1, source.row_bytes * batch_rows))))
    folder = output.with_name(f"{output.name}.parts")
    form = _form(bundle, predictor, source)
    limits = bundle.signature.limits.model_copy(update={"max_batch_size": part_rows, "max_body_bytes": sys.maxsize})
    work = Work(
        bundle, bundle.signature.model_copy(update={"limits": limits}), source.path, form, output.suffix.lower(),
        folder, batch_rows, part_rows, predictor.unbatched_reason, threads,
    )  # fmt: skip
    job = {"bundle": bundle.digest, **source.identity, "rows_per_part": part_rows, "format": work.format}
    if count > 1 and (joined := _joined_before(output, job)):
        return joined
    _check_output(request)
    _claim(folder, job)
    there, size = {*os.listdir(folder)}, source.rows

    def needed(index: int) -> bool:
        return index % count == number - 1 and work.name(index) not in there

    bounds = [(start // part_rows, min(part_rows, size - start)) for start in range(0, size, part_rows)] if size else []
    total = sum(rows for index, rows in bounds if needed(index)) or None
    done, computing_since = 0, time.monotonic()
    try:
        for rows in _compute(work, predictor, source.parts(part_rows, needed), workers):
            done += rows
            report(done, total)
        speed = round(done / max(1e-3, time.monotonic() - computing_since))
        assert source.rows is not None, "all parts are read"
        names = [work.name(index) for index in range(math.ceil(source.rows / part_rows))]
        result = {"rows": source.rows, "output": str(output), "rows_per_second": speed}
        is_joined = _join(work, names, output, {"job": job, "result": result} if count > 1 else None)
    except KeyboardInterrupt:
        again = "the same command continues with the next part"
        raise Interrupted(f"{output}: interrupted; the finished parts are in {folder}; {again}") from None
    return result if is_joined else {**result, "rows": done, "output": None}


def _check(request: Request) -> None:
    output = request.output
    if request.bundle.signature.generation is not None:
        raise ConfigError(f"{request.bundle.path}: generates texts; to fix it: use its service, `pipe serve`")
    if output.suffix.lower() not in FORMATS:
        raise ConfigError(f"{output}: name an output that ends in {', '.join(FORMATS)}")
    if not output.absolute().parent.is_dir():
        raise ConfigError(f"{output.parent}: no such folder; to fix it: create it")
    if request.source.is_dir() and output.resolve().is_relative_to(request.source.resolve()):
        raise ConfigError(f"{output}: is in the folder of the inputs; to fix it: write it to another one")
    if request.shard[1] == 1:
        _check_output(request)


def _check_output(request: Request) -> None:
    if request.output.exists() and not request.overwrite:
        raise ConfigError(f"{request.output}: exists; to fix it: name another file, or add --overwrite")


def _record(output: Path) -> Path:
    return output.with_name(f"{output.name}.job.json")


def _joined_before(output: Path, job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of shards that have joined this output; empty if it is of another job."""
    if not (output.exists() and _record(output).exists()):
        return {}
    recorded = read_object(_record(output), remedy="remove it")
    is_same = recorded["job"] == job and recorded["modified"] == output.stat().st_mtime_ns
    return dict(recorded["result"]) if is_same else {}


def largest_batch(predictor: Predictor) -> int:
    """Return how many rows run together: as many as the service merges, and more of small rows of a fixed shape."""
    signature = predictor.signature
    if predictor.unbatched_reason:
        return 1
    limits, rows = signature.limits, signature.runtime.batch_rows
    shapes = [spec.shape[1:] for spec in signature.inputs]
    if all(isinstance(axis, int) for shape in shapes for axis in shape):
        sizes = [np.dtype(NUMPY_TYPES[spec.datatype]).itemsize for spec in signature.inputs]
        row_bytes = sum(size * math.prod(map(int, shape)) for size, shape in zip(sizes, shapes, strict=True)) or 1
        rows = min(max(rows, _BATCH_BYTES // row_bytes), max(1, limits.max_body_bytes // row_bytes))
    return min(rows, limits.max_batch_size)


def _claim(folder: Path, job: Mapping[str, Any]) -> None:
    """Create the folder of the parts, or check that those in it are of the same job."""
    folder.mkdir(exist_ok=True)
    if not (path := folder / "job.json").exists():
        write_json(path, job)
    recorded = read_object(path, remedy=f"remove {folder}")
    for name in {**job, **recorded}:
        if recorded.get(name) != job.get(name):
            label, fix = name.replace("_", " "), f"to fix it: remove {folder}"
            raise ConfigError(f"{folder}: has parts of {label} {recorded.get(name)}, not {job.get(name)}; {fix}")


@dataclass
class Source:
    """Rows of a file or folder in batches of columns; lines of JSON and names of files are columns as well."""

    path: Path
    kind: str  # parquet, csv, jsonl or folder
    names: Sequence[str]  # of a row's fields
    identity: Mapping[str, Any]
    row_bytes: float = 0.0
    rows: int | None = None  # None: unknown until all parts are read
    files: Sequence[str] = ()  # of a folder

    def parts(self, size: int, needed: Needed) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield the needed parts with their numbers."""
        current, end, pieces = 0, 0, list[pa.RecordBatch]()
        with _readable(self.path):
            for start, batch in self._batches(size, needed):
                for offset in _bounds(start, batch.num_rows, size):
                    index, piece = (start + offset) // size, batch.slice(offset, size - (start + offset) % size)
                    if index != current and pieces:
                        yield current, _joined(pieces)
                        pieces = []
                    current, pieces = index, [*pieces, piece] if needed(index) else pieces
                end = start + batch.num_rows
        if pieces:
            yield current, _joined(pieces)
        self.rows = end if self.rows is None else self.rows

    def _batches(self, size: int, needed: Needed) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield batches with the number of their first row; groups of rows without a needed part may be left out."""
        start = 0
        match self.kind:
            case "parquet":
                with parquet.ParquetFile(self.path, pre_buffer=False, buffer_size=1 << 20) as file:
                    for group in range(file.num_row_groups):
                        end = start + file.metadata.row_group(group).num_rows
                        if any(map(needed, range(start // size, math.ceil(end / size)))):
                            for batch in file.iter_batches(size, [group], use_threads=False):
                                yield start, batch
                                start += batch.num_rows
                        start = end
            case "csv":
                texts = dict.fromkeys(self.names, pa.string())
                convert = csv.ConvertOptions(column_types=texts, null_values=[""], strings_can_be_null=True)
                parse = csv.ParseOptions(newlines_in_values=True)
                with csv.open_csv(self.path, csv.ReadOptions(use_threads=False), parse, convert) as reader:
                    for batch in reader:
                        yield start, batch
                        start += batch.num_rows
            case "jsonl":
                lines = _lines(self.path)
                while some := list(itertools.islice(lines, size)):
                    yield start, pa.record_batch({"line": pa.array(some, pa.binary())})
                    start += len(some)
            case _:
                for start in range(0, len(self.files), size):
                    yield start, pa.record_batch({"file": pa.array(self.files[start : start + size])})


def open_source(path: Path) -> Source:
    """Return the rows of a path, with what identifies its content."""
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
        names = [str(file.relative_to(path)) for file in files]
        texts = [f"{name} {(path / name).stat().st_size} {(path / name).stat().st_mtime_ns}" for name in names]
        identity = {"input": path.name, "input_files": len(names), "input_digest": digest_parts(texts)}
        return Source(path, "folder", (), identity, rows=len(names), files=names)
    if not path.is_file():
        raise ConfigError(f"{path}: no such file or folder")
    status = path.stat()
    identity = {"input": path.name, "input_bytes": status.st_size, "input_modified": status.st_mtime_ns}
    with path.open("rb") as file:
        start = file.read(_SAMPLE_BYTES)
    row_bytes = len(start) / max(1, start.count(b"\n"))
    with _readable(path):
        match path.suffix.lower():
            case ".parquet":
                with parquet.ParquetFile(path) as table:
                    schema, rows = table.schema_arrow, table.metadata.num_rows
                    groups = [table.metadata.row_group(number) for number in range(table.num_row_groups)]
                if wrong := [f for f in schema if pa.types.is_temporal(f.type) or pa.types.is_decimal(f.type)]:
                    fix = "to fix it: store numbers or texts"
                    raise ConfigError(f"{path}: column {wrong[0].name} is {wrong[0].type}, which JSON lacks; {fix}")
                row_bytes = sum(group.total_byte_size for group in groups) / max(1, rows)
                return Source(path, "parquet", schema.names, identity, row_bytes, rows)
            case ".csv":
                with csv.open_csv(path) as reader:
                    return Source(path, "csv", reader.schema.names, identity, row_bytes)
            case ".jsonl":
                first = None
                with contextlib.suppress(InvalidPayload):  # reported with its row
                    first = _parse(next(_lines(path), b"null"))
                return Source(path, "jsonl", [*first] if isinstance(first, dict) else [], identity, row_bytes)
    raise ConfigError(f"{path}: is no .parquet, .csv or .jsonl file, and no folder of files")


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except pa.ArrowException as error:
        raise DataError(f"{path}: cannot be read: {_line(error)}; to fix it: write the file again") from error


def _bounds(start: int, rows: int, size: int) -> list[int]:
    """Return where parts begin in a batch of rows, and 0."""
    return [0, *range(size - start % size, rows, size)] if rows else []


def _joined(pieces: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    return pieces[0] if len(pieces) == 1 else pa.Table.from_batches(pieces).combine_chunks().to_batches()[0]


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from filter(bytes.strip, file)  # an empty line is no row


def _parse(line: bytes) -> Any:
    """Parse a line as the service parses the instances of a request."""
    instances = v1.parse(b'{"instances":[%b]}' % line)
    if len(instances) != 1:
        raise InvalidPayload(f"the line has {len(instances)} values")
    return instances[0]


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


@dataclass(frozen=True)
class Form:
    """How a row becomes an instance, or the tensors of the model."""

    kind: str  # of the source
    is_tensors: bool  # its fields are the inputs of the model
    is_mapping: bool  # the instance has the row's fields; else it is the only one
    datatypes: Mapping[str, str]  # of CSV's columns: int, float or bool; the others are texts


def _form(bundle: Bundle, predictor: Predictor, source: Source) -> Form:
    signature, examples = bundle.signature, bundle.golden().instances
    keys = {key for example in examples if isinstance(example, dict) for key in example}
    inputs = {spec.name: spec.datatype for spec in signature.inputs}
    has_inputs = {*source.names} == {*inputs} and keys != {*inputs}
    is_tensors = not signature.codec or (has_inputs and source.kind != "folder")
    is_mapping = bool(keys) or not examples
    if not is_tensors and source.kind == "folder" and not predictor.media_types:
        raise ConfigError(f"{source.path}: the bundle's codec has no media_types; to fix it: give a table or .jsonl")
    if not (is_tensors or is_mapping) and source.kind in ("parquet", "csv") and len(source.names) != 1:
        names, example = ", ".join(source.names), json.dumps(examples[0])[:80]
        raise ConfigError(f"{source.path}: has the columns {names}, and an instance is one value, as {example}")
    if is_tensors:
        kinds = {name: np.dtype(NUMPY_TYPES[datatype]).kind for name, datatype in inputs.items()}
        return Form(source.kind, True, True, {name: _CSV_KINDS.get(kind, "") for name, kind in kinds.items()})
    rows = examples if is_mapping else [dict.fromkeys(source.names, example) for example in examples]
    datatypes = {name: _csv_kind([row.get(name) for row in rows if isinstance(row, dict)]) for name in source.names}
    return Form(source.kind, False, is_mapping, datatypes)


_CSV_KINDS = {"f": "float", "i": "int", "u": "int", "b": "bool"}  # by the kinds of numpy


def _csv_kind(values: Sequence[Any]) -> str:
    kinds = {type(value) for value in values}
    return "float" if float in kinds else "int" if int in kinds else "bool" if bool in kinds else ""


@dataclass(frozen=True)
class Work:
    """How parts are computed and written, by any process."""

    bundle: Bundle
    signature: Signature  # of parts, which have more rows than a request may
    source: Path
    form: Form
    format: str  # of the output
    folder: Path
    batch_rows: int
    part_rows: int
    unbatched_reason: str
    threads: int

    def name(self, index: int) -> str:
        return f"{index:08d}.parquet"

    def load(self) -> Predictor:
        """Load the bundle, whose files and golden requests were checked before the work began."""
        from serve.runtime.predictor import Predictor
        from serve.runtime.session import Session

        predictor = Predictor(self.bundle, Session(self.bundle, threads=self.threads))
        predictor.unbatched_reason = self.unbatched_reason
        return predictor

    def compute(self, predictor: Predictor, index: int, rows: pa.RecordBatch) -> int:
        """Write a part; return its number of rows."""
        first, places = index * self.part_rows + 1, range(0, rows.num_rows, self.batch_rows)
        arrays = self._part_tensors(rows) if self.form.is_tensors else None
        tables = []
        for place in places:
            batch = arrays and {name: array[place : place + self.batch_rows] for name, array in arrays.items()}
            tables.append(self._batch(predictor, rows.slice(place, self.batch_rows), first + place, batch))
        sink = pa.BufferOutputStream()
        with _tabular():
            table = pa.concat_tables(tables, promote_options="permissive")
            if self.form.kind == "folder" and self.format != ".jsonl":
                table = table.add_column(0, "file", rows["file"])
            parquet.write_table(table, sink, use_dictionary=False, compression="none")  # read once
        write_atomic(self.folder / self.name(index), sink.getvalue().to_pybytes())
        return len(rows)

    def _part_tensors(self, rows: pa.RecordBatch) -> Arrays | None:
        """Return the inputs of a whole part, which is quicker than for each batch; None if not all rows are right."""
        with contextlib.suppress(InvalidPayload):
            parts = _tensors(self._columns(rows), self.signature)
            return parts[0].arrays if len(parts) == 1 else None
        return None

    def _batch(self, predictor: Predictor, rows: pa.RecordBatch, first: int, arrays: Arrays | None = None) -> pa.Table:
        try:
            return self._predict(predictor, rows, arrays)
        except InvalidPayload as error:
            position, reason = self._first_refused(predictor, rows) or (0, _reason(error))
            row = rows["file"][position] if self.form.kind == "folder" else f"row {first + position}"
            raise DataError(f"{self.source}: {row}: {reason}") from error

    def _first_refused(self, predictor: Predictor, rows: pa.RecordBatch, first: int = 0) -> tuple[int, str] | None:
        """Return the position of the first row that is refused on its own, and why, by halving the batch."""
        try:
            self._predict(predictor, rows)
        except InvalidPayload as error:
            if rows.num_rows == 1:
                return first, _reason(error)
            half = rows.num_rows // 2
            return self._first_refused(predictor, rows.slice(0, half), first) or self._first_refused(
                predictor, rows.slice(half), first + half
            )
        return None

    def _predict(self, predictor: Predictor, rows: pa.RecordBatch, arrays: Arrays | None = None) -> pa.Table:
        predictions: Sequence[Any]
        if not self.form.is_tensors:
            predictions = predictor.predict(self._instances(rows))
        else:
            whole = arrays and [Part(range(rows.num_rows), arrays)]
            parts = whole or _tensors(self._columns(rows), self.signature)
            outputs = [predictor.run(part.arrays) for part in parts]
            for part, computed in zip(parts, outputs, strict=True):
                if wrong := [name for name, array in computed.items() if array.shape[:1] != (len(part.positions),)]:
                    raise ConfigError(f"output {wrong[0]} has no row for each row of the inputs; use the service")
            if len(parts) == 1 and self.format != ".jsonl":
                return pa.table({name: _nested(array) for name, array in outputs[0].items()})
            predictions = in_order(parts, [_rows(computed) for computed in outputs])
        if self.format == ".jsonl":
            lines = [orjson.dumps(prediction, option=orjson.OPT_SERIALIZE_NUMPY) for prediction in predictions]
            return pa.table({_JSON: pa.array(lines, pa.binary())})
        with _tabular():
            if all(isinstance(prediction, dict) for prediction in predictions):
                names = dict.fromkeys(itertools.chain.from_iterable(predictions))
                return pa.table({name: _column([row.get(name) for row in predictions]) for name in names})
            return pa.table({"prediction": _column(list(predictions))})

    def _instances(self, rows: pa.RecordBatch) -> list[Any]:
        match self.form.kind:
            case "jsonl":
                return [_parse(line) for line in rows["line"].to_pylist()]
            case "folder":
                files = [(self.source / name).read_bytes() for name in rows["file"].to_pylist()]
                return [{"b64": base64.b64encode(file).decode()} for file in files]
        columns = {name: _values(column) for name, column in self._columns(rows).items()}
        if not self.form.is_mapping:
            return next(iter(columns.values()))
        names = list(columns)
        return [dict(zip(names, row, strict=False)) for row in zip(*columns.values(), strict=True)]

    def _columns(self, rows: pa.RecordBatch) -> dict[str, pa.Array]:
        if self.form.kind == "jsonl":
            parsed = [_parse(line) for line in rows["line"].to_pylist()]
            if not all(isinstance(row, dict) for row in parsed):
                raise InvalidPayload("a row must be an object with the inputs of the model")
            names = dict.fromkeys(itertools.chain.from_iterable(parsed))
            try:
                return {name: pa.array([row.get(name) for row in parsed]) for name in names}
            except pa.ArrowException as error:
                raise InvalidPayload(_line(error)) from error
        columns = dict(zip(rows.schema.names, rows.columns, strict=True))
        if self.form.kind == "csv":
            return {name: _number(name, texts, self.form.datatypes.get(name, "")) for name, texts in columns.items()}
        return columns


_CSV_TYPES = {"": [pa.string()], "bool": [pa.bool_()], "int": [pa.int64(), pa.float64()], "float": [pa.float64()]}


def _number(name: str, texts: pa.Array, datatype: str) -> pa.Array:
    for kind in _CSV_TYPES[datatype]:
        with contextlib.suppress(pa.ArrowInvalid):
            return texts.cast(kind)
    raise InvalidPayload(f"{name}: {texts[0].as_py()!r} is no {'bool' if datatype == 'bool' else 'number'}")


def _values(column: pa.Array) -> list[Any]:
    """Return values as JSON has them: a missing number, null or NaN, is None."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _values(column.dictionary_decode())
    if pa.types.is_floating(kind) or (pa.types.is_integer(kind) and not column.null_count):
        array = _numbers(column)
        values: list[Any] = array.tolist()
        return [None if value != value else value for value in values] if np.isnan(array).any() else values
    values = column.to_pylist()
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return [None if value is None else base64.b64encode(value).decode() for value in values]
    return [null_for_nan(value) for value in values] if pa.types.is_nested(kind) else values


class _RaggedError(Exception):
    """Rows have lists of different lengths."""


def _tensors(columns: Mapping[str, pa.Array], signature: Signature) -> list[Part]:
    """Return the inputs of the model, checked as those of the Open Inference Protocol, and for missing numbers."""
    try:
        tensors = [_tensor(name, column, signature) for name, column in columns.items()]
    except _RaggedError:
        rows = range(len(next(iter(columns.values()))))
        one_by_one = [{name: column.slice(row, 1) for name, column in columns.items()} for row in rows]
        return join_equal_shapes([_tensors(row, signature)[0].arrays for row in one_by_one], list(columns))
    arrays = InferRequest("", tensors, ()).arrays(signature)
    check_missing(arrays, signature)
    return [Part(range(len(next(iter(arrays.values())))), arrays)]


def _tensor(name: str, column: pa.Array, signature: Signature) -> Tensor:
    spec, shape = signature.input_specs.get(name), [len(column)]
    if spec is None:
        return Tensor(name, "", shape)  # its name is refused
    while pa.types.is_nested(column.type):
        if column.null_count or pa.types.is_struct(column.type):
            raise InvalidPayload(f"{name}: must be lists of {spec.datatype}, without null")
        sizes = pc.unique(pc.list_value_length(column)).to_pylist()
        if len(sizes) != 1:
            raise _RaggedError
        shape.append(sizes[0])
        column = column.flatten()
    fixed = [axis for axis in spec.shape[1:] if isinstance(axis, int)]
    if len(fixed) == len(spec.shape) - 1 and math.prod(fixed) == math.prod(shape[1:]):
        shape = [len(column) // max(1, math.prod(fixed)), *fixed]  # as a number for [1], or a flat list
    kind, data = np.dtype(NUMPY_TYPES[spec.datatype]).kind, _numbers(column)
    if data.dtype.kind in "iu" and kind == "f":
        data = data.astype(np.float64)
    elif data.dtype.kind + kind in ("iu", "ui") and (not data.size or 0 <= data.min() <= data.max() < 1 << 63):
        data = data.astype(np.int64 if kind == "i" else np.uint64)
    if spec.datatype == "BYTES" and (column.null_count or not pa.types.is_string(column.type)):
        raise InvalidPayload(f"{name}: must be texts, without null")
    return Tensor(name, spec.datatype, shape, data)


def _rows(arrays: Arrays) -> list[dict[str, Any]]:
    """Return a row of each array as one prediction; texts, which are objects, as lists."""
    values = [array.tolist() if array.dtype == np.object_ else array for array in arrays.values()]
    return [dict(zip(arrays, row, strict=True)) for row in zip(*values, strict=True)]


def _nested(array: np.ndarray[Any, Any]) -> pa.Array:
    values = _column(array.reshape(-1))
    for axis in reversed(range(1, array.ndim)):
        count = math.prod(array.shape[:axis])
        places = np.arange(count + 1, dtype=np.int32) * array.shape[axis]
        values = pa.Array.from_buffers(pa.list_(values.type), count, [None, pa.py_buffer(places)], children=[values])
    return values


def _column(values: np.ndarray[Any, Any] | list[Any]) -> pa.Array:
    """Return numbers as a column without pandas, which pyarrow's own function loads for a quarter of a second."""
    if isinstance(values, list) and {*map(type, values)} == {float}:
        values = np.array(values)
    if isinstance(values, list) or values.dtype.kind not in "iuf":
        return pa.array(values)
    data = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, data])


def _numbers(column: pa.Array) -> np.ndarray[Any, Any]:
    """Return a column as an array, without pandas if all are numbers."""
    is_number = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
    if is_number and not column.null_count:
        return np.from_dlpack(column)
    array: np.ndarray[Any, Any] = column.to_numpy(zero_copy_only=False)
    return array


@contextlib.contextmanager
def _tabular() -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, TypeError) as error:
        raise ConfigError(f"the predictions fit in no such table: {_line(error)}; to fix it: write .jsonl") from error


def _reason(error: InvalidPayload) -> str:
    from serve.runtime.predictor import CodecError

    cause = error.__cause__
    return f"{error} ({type(cause).__name__}: {_line(cause or error)})" if isinstance(error, CodecError) else str(error)


def _compute(
    work: Work, predictor: Predictor, parts: Iterator[tuple[int, pa.RecordBatch]], workers: Mapping[Connection, Worker]
) -> Iterator[int]:
    """Yield the number of rows of each part, as it is written."""
    alone_until = time.monotonic() + _ALONE_SECONDS
    unfinished: dict[Connection, int] = {}
    for index, rows in parts:
        yield from _receive_results(workers, unfinished, timeout_seconds=0)
        if len(unfinished) < len(workers) and all(unfinished.values()) and time.monotonic() >= alone_until:
            connection = next(iter(workers.keys() - unfinished.keys()))
            unfinished[connection] = 0
            connection.send(work)
        if min(unfinished.values(), default=_WAITING_PARTS) >= _WAITING_PARTS:
            yield work.compute(predictor, index, rows)
            continue
        connection = min(unfinished, key=lambda each: unfinished[each])
        unfinished[connection] += 1
        with contextlib.suppress(OSError):  # it has ended, which is seen where its result is received
            connection.send(index)
            connection.send_bytes(_packed(rows))
    while any(unfinished.values()):
        yield from _receive_results(workers, unfinished)


def _receive_results(
    workers: Mapping[Connection, Worker], unfinished: dict[Connection, int], timeout_seconds: float | None = None
) -> Iterator[int]:
    for connection in wait([each for each, count in unfinished.items() if count], timeout_seconds):
        assert isinstance(connection, Connection)
        try:
            result = connection.recv()
        except (EOFError, OSError):
            workers[connection].join()
            ending = describe_exit("a worker process", workers[connection].exitcode or 0)
            fix = "to fix it: run the same command again, with fewer --processes where memory is short"
            raise StageError(f"{ending}; {fix}") from None
        if isinstance(result, PipelineError):
            raise result
        unfinished[connection] -= 1
        yield result


@contextlib.contextmanager
def _forked(count: int) -> Iterator[dict[Connection, Worker]]:
    """Fork processes that wait for work; they end with their connections."""
    workers: dict[Connection, Worker] = {}
    try:
        for _ in range(count):
            ours, theirs = Pipe()
            worker = multiprocessing.get_context("fork").Process(target=_run_worker, args=(theirs, ours), daemon=True)
            worker.start()
            theirs.close()
            workers[ours] = worker
        yield workers
    finally:
        for worker in workers.values():
            worker.kill()
        for connection, worker in workers.items():
            worker.join()
            connection.close()


def _run_worker(connection: Connection, other_end: Connection) -> None:
    other_end.close()
    os.setsid()  # Ctrl-C does not reach it
    received: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive_work, args=(connection, received), daemon=True).start()
    work: Work = received.get()
    try:
        predictor = work.load()
        while True:
            index, packed = received.get()
            with pa.ipc.open_stream(packed) as stream:
                connection.send(work.compute(predictor, index, stream.read_next_batch()))
    except PipelineError as error:
        connection.send(error)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        connection.send(disk_full(work.folder, "run the same command again"))


def _receive_work(connection: Connection, received: queue.SimpleQueue[Any]) -> None:
    with contextlib.suppress(EOFError, OSError):
        received.put(connection.recv())
        while True:
            received.put((connection.recv(), connection.recv_bytes()))
    os._exit(0)  # the process that started this one is gone, or needs no more


def _packed(rows: pa.RecordBatch) -> pa.Buffer:
    """Return the bytes of these rows alone, which may be a slice of many."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_batch(rows)
    return sink.getvalue()


def _join(work: Work, names: Sequence[str], output: Path, record: Mapping[str, Any] | None) -> bool:
    """Join the parts, unless some of other shards are missing; a record of it is for a shard that is started again."""
    joined, removed = (place / f".{secrets.token_hex(8)}" for place in (work.folder, output.parent))
    try:
        if {*names} - {*os.listdir(work.folder)}:
            return False
        _write_joined(work, names, joined)
        sync(joined)
        if record:
            write_json(_record(output), {**record, "modified": joined.stat().st_mtime_ns})
        os.replace(joined, output)
        sync(output.parent)
        os.rename(work.folder, removed)
    except FileNotFoundError:  # another shard has joined them at the same moment
        if work.folder.exists() or not output.exists():
            raise
        return True
    shutil.rmtree(removed)
    return True


def _write_joined(work: Work, names: Sequence[str], path: Path) -> None:
    schemas = [parquet.read_schema(work.folder / name) for name in names]
    with _tabular(), path.open("wb") as file, contextlib.ExitStack() as stack:
        schema = pa.unify_schemas(schemas, promote_options="permissive") if schemas else pa.schema([])
        writer = None
        if work.format != ".jsonl":
            kind = csv.CSVWriter if work.format == ".csv" else parquet.ParquetWriter
            writer = stack.enter_context(kind(file, schema))
        for name in names:
            with parquet.ParquetFile(work.folder / name) as part:
                table = part.read(use_threads=False)
            if writer is None:
                file.writelines(line + b"\n" for line in table[_JSON].to_pylist())
                continue
            if table.schema != schema:
                tables = [schema.empty_table(), table]
                table = pa.concat_tables(tables, promote_options="permissive").cast(schema)
            writer.write_table(table)
