"""Batches with other samples than the ledger names are detected, however the data are loaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import default_collate

from pipeline.contract.data import Samples
from pipeline.system.processes import Rank
from train.batch_order import Indices
from train.checkpoint.store import CheckpointStore
from train.data import BatchLoader, LoadedBatch, LoadRequest
from train.ledger import Ledger, LedgerVerification, read_lines, verify_ledger
from train.process_group import ProcessGroup
from train.sample_checksums import batch_checksums, item_checksum, read_checksums, write_checksums
from train.state import Progress

from .distributed import Wave, trainer

CPU = ProcessGroup(Rank(), torch.device("cpu"))


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """The same samples, one by one."""

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns["x"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= len(self):
            raise IndexError(index)
        return {name: column[index] for name, column in self.columns.items()}


class Augmented(Rows):
    def __getitem__(self, index: int) -> dict[str, Any]:
        item = super().__getitem__(index)
        return {**item, "x": item["x"] + np.random.normal(size=3).astype(np.float32)}


class Items(Wave):
    source: Callable[[Mapping[str, Any]], Any] = Rows

    def data(self, split: str) -> Any:
        columns = super().data(split)
        return type(self).source(columns) if split == "train" else columns


class Padded(Items):
    def collate(self, samples: Any) -> dict[str, Tensor]:
        return default_collate([{**sample, "length": torch.tensor(len(samples))} for sample in samples])  # type: ignore[no-any-return]


class Stream:
    def __init__(self, columns: Mapping[str, Any]) -> None:
        self.rows = Rows(columns)

    def __iter__(self) -> Iterator[Any]:
        return (self.rows[index] for index in range(len(self.rows)))


class Streamed(Items):
    source = Stream


class Random(Items):
    source = Augmented


def verified(folder: Path, task: Any, **train: Any) -> LedgerVerification:
    """Prepare, train two epochs of ten steps, and verify the ledger."""
    made = trainer(CPU, task, epochs=2, **train)
    samples = Samples("train", task.data("train"), getattr(task, "collate", None))
    (folder / "data.json").write_text(json.dumps(write_checksums(samples, folder)))
    checksums = read_checksums(folder)
    ledger = Ledger(folder, CPU, made.order, 0, 1, checksums)
    made.fit(Progress(), CheckpointStore(folder / "checkpoints", 9, {}, CPU), None, ledger=ledger)
    return verify_ledger(read_lines(folder / "ledger.jsonl"), made.order, 20, checksums)


def next_samples(load: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(self: Samples, indices: Any, *epoch: int) -> Any:
        return load(self, (np.asarray(indices) + 1) % len(self), *epoch)

    return wrong


def next_rows(pick: Callable[..., LoadedBatch]) -> Callable[..., LoadedBatch]:
    def wrong(self: BatchLoader, columns: Mapping[str, Tensor], indices: Indices) -> LoadedBatch:
        return pick(self, columns, (indices + 1) % 149)._replace(indices=indices)

    return wrong


def next_request(load: Callable[..., LoadedBatch]) -> Callable[..., LoadedBatch]:
    def wrong(self: BatchLoader, request: LoadRequest) -> LoadedBatch:
        return load(self, replace(request, indices=(request.indices + 1) % 149))

    return wrong


def stale(fetch: Callable[..., LoadedBatch]) -> Callable[..., LoadedBatch]:
    def wrong(self: BatchLoader, request: LoadRequest) -> LoadedBatch:
        found = fetch(self, request)
        other = fetch(self, replace(request, indices=(request.indices + 7) % 149))
        return found._replace(columns=other.columns, checksums=batch_checksums(other.columns))

    return wrong


def other_labels(pick: Callable[..., LoadedBatch]) -> Callable[..., LoadedBatch]:
    def wrong(self: BatchLoader, *args: Any) -> LoadedBatch:
        found = pick(self, *args)
        return found._replace(columns={**found.columns, "target": found.columns["target"].roll(1, 0)})

    return wrong


FEEDS: dict[str, tuple[Any, Any, str, Callable[..., Any], dict[str, Any]]] = {
    "columns: the next samples": (Wave(), BatchLoader, "_pick", next_rows, {}),
    "columns: samples of another step": (Wave(), BatchLoader, "fetch", stale, {"accumulate": 2}),
    "columns: labels of other samples": (Wave(), BatchLoader, "_pick", other_labels, {}),
    "items: the next samples": (Items(), Samples, "load", next_samples, {}),
    "items, by a worker": (Items(), BatchLoader, "_load", next_request, {"workers": 1}),
    "items with collate(): the next samples": (Padded(), Samples, "load", next_samples, {}),
    "items drawn at random": (Random(), BatchLoader, "_load", next_request, {}),
}


@pytest.mark.parametrize("task", [Wave(), Items(), Padded(), Streamed()], ids=lambda task: type(task).__name__)
@pytest.mark.parametrize("workers", [0, 1])
def test_correct_batches_match_the_checksums_of_prepare(tmp_path: Path, task: Any, workers: int) -> None:
    assert verified(tmp_path, task, accumulate=2, workers=workers).fault == ""
    assert all(line.contents for line in read_lines(tmp_path / "ledger.jsonl"))


@pytest.mark.parametrize("feed", FEEDS)
def test_wrong_batches_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, feed: str) -> None:
    task, owner, name, change, settings = FEEDS[feed]
    fit = Ledger.__init__

    def begin(self: Ledger, *args: Any, **settings: Any) -> None:  # after prepare has read the correct samples
        monkeypatch.setattr(owner, name, change(getattr(owner, name)))
        fit(self, *args, **settings)

    monkeypatch.setattr(Ledger, "__init__", begin)
    fault = verified(tmp_path, task, **settings).fault
    contents = "line 1: step 1 was given samples with other contents than those that prepare read"
    assert fault in (contents, "line 1: step 1 was trained on samples that no step has")


def test_data_that_are_drawn_at_random_have_no_checksums(tmp_path: Path) -> None:
    assert verified(tmp_path, Random()).fault == ""
    assert not any(line.contents for line in read_lines(tmp_path / "ledger.jsonl"))
    assert not (tmp_path / "checksums.npy").exists()


def test_epochs_of_a_stream_with_other_orders_are_not_compared(tmp_path: Path) -> None:
    class Shuffled(Stream):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[Any]:
            order = np.random.default_rng(self.epoch).permutation(len(self.rows))
            return (self.rows[index] for index in order)

    class Orders(Items):
        source = Shuffled

    assert verified(tmp_path, Orders()).fault == ""
    assert [bool(line.contents) for line in read_lines(tmp_path / "ledger.jsonl")] == [True] * 10 + [False] * 10


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bool, torch.bfloat16, torch.float64, torch.int64, torch.complex64]
)
def test_checksums_cover_the_whole_width_of_a_sample(dtype: torch.dtype) -> None:
    rows = torch.zeros(3, 40, 5).to(dtype)
    rows[1, 20:] = 1
    rows[2] = 1
    assert len(set(batch_checksums({"x": rows}).tolist())) == 3
    assert item_checksum({"x": rows[2]}) == batch_checksums({"x": rows})[2]


def test_checksum_of_an_item_covers_texts_and_numbers() -> None:
    item = {"text": "a cat", "label": 3, "path": Path("x")}
    assert item_checksum(item) != item_checksum({**item, "text": "a dog"})
    assert item_checksum(item) != item_checksum({**item, "label": 4})
    assert item_checksum(item) == item_checksum({**item, "path": Path("y")})
