"""Token ids of many texts on disk: written once in shards, read as rows of one length from files that are mapped."""

from __future__ import annotations

import functools
import json
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from pipeline.system.errors import DataError
from pipeline.system.files import write_json
from pipeline.user.readers import Items, find_files

if TYPE_CHECKING:
    import numpy as np

    Array: TypeAlias = np.ndarray[Any, Any]

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
