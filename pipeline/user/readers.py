"""Read data files for a task: tables, pictures, JSON lines, data sets of Hugging Face, shards of tar files and tokens.

Every reader takes a path relative to the project, or a pattern such as `data/*.parquet`. Prepare records which files
were read, so that it runs again when one has changed.
"""

from __future__ import annotations

import functools
import glob
import io
import json
import os
import tarfile
from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from pipeline.system.errors import DataError
from pipeline.system.files import digest_file, read_object, write_json

if TYPE_CHECKING:
    import numpy as np
    import pyarrow

    Array: TypeAlias = np.ndarray[Any, Any]

Sample: TypeAlias = "dict[str, Any]"
Transform: TypeAlias = "Callable[[Any], Any]"

READ_FILES = "read_files.json"  # of the prepare step
_patterns: dict[str, None] = {}  # that this process has read, in order


def read_table(path: str, columns: Sequence[str] | None = None) -> dict[str, Array]:
    """Return the columns of CSV (`.csv`, `.tsv`) or Parquet files as arrays.

    A missing number becomes NaN. Texts are arrays of objects, which the task turns into numbers.
    """
    import pyarrow

    tables = [_read_arrow(file, columns) for file in find_files(path)]
    try:
        table = pyarrow.concat_tables(tables, promote_options="permissive")
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: the files have different columns ({_line(error)})") from error
    return {name: _as_array(table.column(name).combine_chunks()) for name in table.column_names}


def read_images(folder: str, transform: Transform | None = None, mode: str = "RGB") -> Images:
    """Return the pictures in a folder with one folder for each class, as `{"image": …, "label": …}`.

    `transform` gets a PIL image; without one, pictures are float arrays from 0 to 1, the channels first.
    """
    return Images(folder, transform, mode)


def read_jsonl(path: str, transform: Transform | None = None) -> JsonLines:
    """Return the objects of files with one JSON object per line; a line is parsed when it is used.

    `transform` turns an object into a sample, for example texts into token ids.
    """
    return JsonLines(path, transform)


def read_dataset(folder: str, split: str = "", transform: Transform | None = None) -> Any:
    """Return a data set of Hugging Face that `save_to_disk` wrote; of several in the folder, the named split."""
    import datasets

    find_files(f"{folder}/**/*")
    loaded = datasets.load_from_disk(folder)
    if isinstance(loaded, Mapping):
        if split not in loaded:
            raise DataError(f"{folder}: has the splits {', '.join(loaded)}; name one: read_dataset({folder!r}, ...)")
        loaded = loaded[split]
    return loaded.with_format("numpy") if transform is None else Transformed(loaded.with_format("numpy"), transform)


def read_shards(path: str, transform: Transform | None = None, shuffle: bool = False, seed: int = 0) -> Shards:
    """Return the samples of tar files as WebDataset writes them: files with one name and several endings are a sample.

    The shards are a stream, read in the order of their names; with `shuffle`, shards and the samples in each are in
    another order in each epoch. `transform` gets a mapping from ending to value, with the name as `__key__`. Values of
    `.json`, `.txt`, `.cls`, `.npy` and pictures are decoded, others are bytes.
    """
    return Shards(find_files(path), transform, shuffle, seed)


def find_files(pattern: str) -> list[Path]:
    """Return the files that a path or pattern names, sorted, and record the pattern for prepare."""
    files = _match(Path(), pattern)
    if not files:
        raise DataError(f"{pattern}: no such file in {Path.cwd()}")
    _patterns[pattern] = None
    return files


def _match(root: Path, pattern: str) -> list[Path]:
    paths = glob.glob(os.path.join(root, pattern), recursive=True)  # pathlib has no absolute patterns
    return sorted(path for path in map(Path, paths) if path.is_file())


class Items:
    """A map-style data set."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Any: ...

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))


class Transformed(Items):
    """A map-style data set whose samples are changed when they are used."""

    def __init__(self, items: Any, transform: Transform) -> None:
        self._items, self._transform = items, transform

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        return self._transform(self._items[index])


_PICTURES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")


class Images(Items):
    """Pictures in `folder/class/name.jpg`; `classes` are the names in order, `labels` the class of each sample."""

    def __init__(self, folder: str, transform: Transform | None, mode: str) -> None:
        pattern = f"{folder}/*/**/*"
        files = [path for path in _match(Path(), pattern) if path.suffix.lower() in _PICTURES]
        if not files:
            raise DataError(f"{folder}: has no pictures in folders of classes, such as {folder}/cat/1.jpg")
        find_files(pattern)
        depth = len(Path(folder).parts)
        names = [path.parts[depth] for path in files]
        self.classes = tuple(sorted(set(names)))
        self.labels = [self.classes.index(name) for name in names]
        self.paths = files
        self._transform, self._mode = transform, mode

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Sample:
        path = self.paths[index]
        return {
            "image": _picture(path.read_bytes(), str(path), self._mode, self._transform),
            "label": self.labels[index],
        }


def _picture(data: bytes, name: str, mode: str, transform: Transform | None) -> Any:
    import numpy as np
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(data)).convert(mode)
    except (UnidentifiedImageError, OSError) as error:
        raise DataError(f"{name}: cannot be read as a picture ({_line(error)})") from error
    if transform is not None:
        return transform(image)
    pixels = np.asarray(image, np.float32) / 255
    return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


class JsonLines(Items):
    """A map-style data set of JSON objects, of which only the places in the files are in memory."""

    def __init__(self, path: str, transform: Transform | None) -> None:
        import numpy as np

        self._files = find_files(path)
        places = []
        for number, file in enumerate(self._files):
            start = 0
            with file.open("rb") as lines:
                for line in lines:
                    if line.strip():
                        places.append((number, start, len(line)))
                    start += len(line)
        self._places = np.array(places, np.int64).reshape(-1, 3)
        self._transform = transform

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Any:
        number, start, size = self._places[index].tolist()
        path = self._files[number]
        try:
            value = json.loads(_read_part(path, start, size))
        except ValueError as error:
            raise DataError(f"{path}, byte {start}: not a line of JSON ({_line(error)})") from error
        if not isinstance(value, dict):
            raise DataError(f"{path}, byte {start}: must be a JSON object, not {type(value).__name__}")
        return value if self._transform is None else self._transform(value)


Part: TypeAlias = tuple[str, int, int]  # ending, offset and size


class Shards:
    """A stream of the samples in tar files; an item is a function that loads one, so that others cost no reading."""

    def __init__(self, files: Sequence[Path], transform: Transform | None, shuffle: bool, seed: int) -> None:
        self._files, self._transform, self._shuffle, self._seed = files, transform, shuffle, seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[Callable[[], Any]]:
        import numpy as np

        # Philox is specified to the bit, so the order is the same on every platform.
        generator = np.random.Generator(np.random.Philox(key=[self._seed, self._epoch]))
        order = generator.permutation(len(self._files)) if self._shuffle else range(len(self._files))
        for number in order:
            path = self._files[number]
            samples = _samples_of(path)
            if self._shuffle:
                listed = list(samples)
                samples = (listed[index] for index in generator.permutation(len(listed)))
            for key, parts in samples:
                yield functools.partial(self._load, path, key, parts)

    def _load(self, path: Path, key: str, parts: Sequence[Part]) -> Any:
        sample: Sample = {"__key__": key}
        for ending, start, size in parts:
            sample[ending] = _decode(_read_part(path, start, size), ending, f"{path}: {key}.{ending}")
        if self._transform is not None:
            return self._transform(sample)
        del sample["__key__"]
        return sample


def _samples_of(path: Path) -> Iterator[tuple[str, list[Part]]]:
    """Yield the name and the parts of each sample, in the order of the file; only headers are read."""
    try:
        with tarfile.open(path, "r:") as archive:
            key, parts = "", list[Part]()
            for member in archive:
                archive.members = []  # type: ignore[attr-defined]  # would grow with the file
                folder, _, name = member.name.rpartition("/")
                stem, _, ending = name.partition(".")
                if not member.isfile() or not stem:
                    continue
                next_key = f"{folder}/{stem}" if folder else stem
                if next_key != key and parts:
                    yield key, parts
                    parts = []
                if ending.lower() in (part[0] for part in parts):
                    raise DataError(f"{path}: has two files {next_key}.{ending}; every sample needs a name of its own")
                key = next_key
                parts.append((ending.lower(), member.offset_data, member.size))
            if parts:
                yield key, parts
    except tarfile.TarError as error:
        raise DataError(
            f"{path}: not a tar file, or a compressed one; write it without compression ({error})"
        ) from error


def _read_part(path: Path, start: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(size)


def _decode(data: bytes, ending: str, name: str) -> Any:
    import numpy as np

    kind = ending.rpartition(".")[2]
    try:
        if kind == "json":
            return json.loads(data)
        if kind in ("txt", "text"):
            return data.decode()
        if kind in ("cls", "cls2", "index", "id"):
            return int(data)
        if kind == "npy":
            return np.load(io.BytesIO(data), allow_pickle=False)
    except ValueError as error:
        raise DataError(f"{name}: cannot be decoded ({_line(error)})") from error
    return _picture(data, name, "RGB", None) if f".{kind}" in _PICTURES else data


def _read_arrow(path: Path, columns: Sequence[str] | None) -> pyarrow.Table:
    import pyarrow
    from pyarrow import csv, parquet

    names = path.name.lower().removesuffix(".gz")
    try:
        if names.endswith((".csv", ".tsv")):
            options = csv.ParseOptions(delimiter="\t" if names.endswith(".tsv") else ",")
            table = csv.read_csv(path, parse_options=options)
        elif names.endswith((".parquet", ".pq")):
            table = parquet.read_table(path)
        else:
            raise DataError(f"{path}: read_table reads .csv, .tsv and .parquet files")
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: cannot be read as a table ({_line(error)})") from error
    if missing := [name for name in columns or () if name not in table.column_names]:
        raise DataError(f"{path}: has no column {', '.join(missing)} (its columns: {', '.join(table.column_names)})")
    return table.select(list(columns)) if columns else table


def _as_array(column: Any) -> Array:
    import numpy as np
    from pyarrow import types

    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if types.is_decimal(column.type) or (types.is_boolean(column.type) and column.null_count):
        column = column.cast("float64")
    if types.is_list(column.type) or types.is_large_list(column.type) or types.is_fixed_size_list(column.type):
        rows = [np.asarray(row) for row in column.to_numpy(zero_copy_only=False)]
        if len({row.shape for row in rows}) == 1:
            return np.stack(rows)
        ragged = np.empty(len(rows), object)  # lists of unequal lengths, for collate()
        ragged[:] = rows
        return ragged
    array: Array = column.to_numpy(zero_copy_only=False)
    return array if array.flags.writeable else array.copy()  # torch cannot mark a tensor as read-only


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


_MAX_HASHED_BYTES = 256 << 20  # a larger file counts as changed when its time has


def write_read_files(root: Path, folder: Path) -> None:
    """Record the files that this process has read, in prepare; nothing if no reader was used."""
    if _patterns:
        files = {pattern: _describe(root, pattern) for pattern in _patterns}
        write_json(folder / READ_FILES, files)


def recall_read_files(folder: Path) -> None:
    """Record as read what another process recorded in a folder."""
    path = folder / READ_FILES
    _patterns.update(dict.fromkeys(read_object(path) if path.is_file() else ()))


def changed_read_files(root: Path, folder: Path) -> list[str]:
    """Return the data files that changed since prepare recorded them; none where the data are on another machine."""
    path = folder / READ_FILES
    recorded: dict[str, dict[str, dict[str, Any]]] = read_object(path) if path.is_file() else {}
    changed = []
    for pattern, files in recorded.items():
        current = {os.path.relpath(file, root): file for file in _match(root, pattern)}
        if current:
            changed += list(current.keys() ^ files.keys())
            changed += [name for name in current.keys() & files.keys() if _is_changed(current[name], files[name])]
    return sorted(changed)


def _describe(root: Path, pattern: str) -> dict[str, dict[str, Any]]:
    files = {}
    for path in _match(root, pattern):
        status = path.stat()
        digest = digest_file(path) if status.st_size <= _MAX_HASHED_BYTES else ""
        files[os.path.relpath(path, root)] = {
            "size": status.st_size, "modified": status.st_mtime_ns, "sha256": digest,
        }  # fmt: skip
    return files


def _is_changed(path: Path, recorded: Mapping[str, Any]) -> bool:
    status = path.stat()
    if (status.st_size, status.st_mtime_ns) == (recorded["size"], recorded["modified"]):
        return False
    return bool(status.st_size != recorded["size"] or digest_file(path) != recorded["sha256"])


_INDEX = "index.json"  # written last, so that a folder without it is incomplete
_SHARD_TOKENS = 1 << 26


def write_token_shards(folder: str | Path, texts: Iterable[Sequence[int]], shard_tokens: int = _SHARD_TOKENS) -> None:
    """Write the token ids of texts; a shard ends with the text that reaches `shard_tokens`."""
    folder = Path(folder)
    if (folder / _INDEX).exists():
        raise DataError(f"{folder}: has tokens already; remove the folder to write it again")
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, int]] = []
    tokens, starts = array("I"), array("Q")
    for text in texts:
        if len(text):
            starts.append(len(tokens))
        tokens.extend(text)
        if len(tokens) >= shard_tokens:
            shards.append(_write_shard(folder, len(shards), tokens, starts))
            tokens, starts = array("I"), array("Q")
    if tokens:
        shards.append(_write_shard(folder, len(shards), tokens, starts))
    if not shards:
        raise DataError(f"{folder}: there are no tokens to write; every text is empty")
    write_json(folder / _INDEX, {"shards": shards})


def _write_shard(folder: Path, number: int, tokens: array[int], starts: array[int]) -> dict[str, int]:
    import numpy as np

    ids = np.frombuffer(tokens, np.uint32)
    tokens_file, starts_file = _files(folder, number)
    np.save(tokens_file, ids if ids.max() > np.iinfo(np.uint16).max else ids.astype(np.uint16))
    np.save(starts_file, np.frombuffer(starts, np.uint64))
    return {"tokens": len(tokens), "texts": len(starts)}


def _files(folder: Path, number: int) -> tuple[Path, Path]:
    return folder / f"{number:05}.tokens.npy", folder / f"{number:05}.starts.npy"


def read_token_shards(folder: str, length: int) -> TokenRows:
    """Return the tokens in rows of `length`, as `pack_texts` lays texts out; a text may continue in the next row."""
    if not (Path(folder) / _INDEX).is_file():
        raise DataError(
            f"{folder}: has no {_INDEX}; write_token_shards() writes it last, so it may have been interrupted"
        )
    find_files(f"{folder}/*")
    return TokenRows(Path(folder).resolve(), length)


class TokenRows(Items):
    """A map-style data set; the last row of a shard is padded on the left, with segment 0."""

    def __init__(self, folder: Path, length: int) -> None:
        import numpy as np

        self._folder, self._length = folder, length
        shards = json.loads((folder / _INDEX).read_text())["shards"]
        self._ends = np.cumsum([-(-shard["tokens"] // length) for shard in shards])  # of the rows of each shard

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> dict[str, Array]:
        import numpy as np

        if not 0 <= index < len(self):
            raise IndexError(index)
        shard = int(np.searchsorted(self._ends, index, side="right"))
        tokens, starts = _open_shard(self._folder, shard)
        begin = (index - (int(self._ends[shard - 1]) if shard else 0)) * self._length
        ids = np.asarray(tokens[begin : begin + self._length], np.int64)
        places = np.arange(begin, begin + len(ids))
        text = np.searchsorted(starts, places, side="right") - 1
        row = {
            "input_ids": ids,
            "attention_mask": text - text[0] + 1,
            "position_ids": places - np.maximum(starts[text].astype(np.int64), begin),
        }
        return {name: np.pad(values, (self._length - len(ids), 0)) for name, values in row.items()}


@functools.lru_cache(maxsize=256)
def _open_shard(folder: Path, number: int) -> tuple[Array, Array]:
    import numpy as np

    tokens, starts = (np.load(file, mmap_mode="r") for file in _files(folder, number))
    return tokens, starts
