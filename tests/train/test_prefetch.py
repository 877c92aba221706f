"""Copying batches ahead to a GPU, with fakes of torch's streams: a side stream copies only when it is waited for."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from pipeline.contract.data import Samples
from pipeline.contract.run import describe
from pipeline.system.errors import StageError
from pipeline.system.processes import Rank
from train.checkpoint.store import CheckpointStore
from train.data import BatchLoader, LoadRequest
from train.ledger import Ledger
from train.process_group import ProcessGroup
from train.sample_checksums import SampleChecksums
from train.state import Progress
from train.trainer import Trainer

from . import distributed
from .distributed import Wave, resumed, trained, weights

CPU = ProcessGroup(Rank(), torch.device("cpu"))
GPU = ProcessGroup(Rank(), torch.device("cuda", 0))
pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")  # torch's DataLoader, on a CPU


class Stream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name
        self.work: list[Callable[[], object]] = []
        self.done = 0

    def record_event(self) -> tuple[Stream, int]:
        return self, len(self.work)

    def wait_event(self, event: tuple[Stream, int]) -> None:
        self.cuda.log(f"{self.name} waits")
        other, count = event
        for copy in other.work[other.done : count]:
            copy()
        other.done = max(other.done, count)


class FakeCuda:
    """A GPU whose memory is the host's, and whose tensors have wrong values until their copy is waited for."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.main = self.current = Stream(self, "main")
        self.calls: list[str] = []
        self.copies: list[Tensor] = []  # kept, so that none has the id of another
        self.recorded: set[tuple[int, str]] = set()
        self._pinned: list[Tensor] = []
        move = torch.Tensor.to

        def to(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
            on_gpu = args and isinstance(args[0], torch.device) and args[0].type == "cuda"
            return self._copy(tensor, **options) if on_gpu else move(tensor, *args, **options)

        patch.setattr(torch.Tensor, "to", to)
        patch.setattr(torch.Tensor, "pin_memory", self._pin)
        patch.setattr(torch.Tensor, "record_stream", self._record)
        patch.setattr(torch.cuda, "Stream", lambda _device: Stream(self, "side"))
        patch.setattr(torch.cuda, "stream", self._enter)
        patch.setattr(torch.cuda, "current_stream", lambda _device: self.current)
        patch.setattr(torch.cuda, "mem_get_info", lambda _device: (0, 0))  # columns stay on the host

    @property
    def used(self) -> list[bool]:
        """Return, for each copy, whether the main stream is known to use its memory."""
        return [(id(copy), "main") in self.recorded for copy in self.copies]

    def log(self, call: str) -> None:
        self.calls.append(call)

    def _copy(self, tensor: Tensor, non_blocking: bool) -> Tensor:
        assert non_blocking
        assert any(tensor is pinned for pinned in self._pinned)
        copy = torch.ones_like(tensor)
        self.log(f"{self.current.name} copies")
        self.copies.append(copy)
        self.current.work.append(lambda: copy.copy_(tensor))
        if self.current is self.main:
            self.main.wait_event(self.main.record_event())
        return copy

    @property
    def _pin(self) -> Callable[[Tensor], Tensor]:
        def pin_memory(tensor: Tensor) -> Tensor:
            self._pinned.append(tensor.clone())
            return self._pinned[-1]

        return pin_memory

    @property
    def _record(self) -> Callable[[Tensor, Stream], None]:
        def record_stream(tensor: Tensor, stream: Stream) -> None:
            self.log("recorded")
            self.recorded.add((id(tensor), stream.name))

        return record_stream

    @contextlib.contextmanager
    def _enter(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Give loaders of trainers a GPU, and leave the model on the CPU."""
    monkeypatch.setattr("train.trainer.BatchLoader", lambda samples, _group, *args: BatchLoader(samples, GPU, *args))
    return FakeCuda(monkeypatch)


class Items(Dataset[dict[str, Any]]):
    """Samples that are augmented with every generator; one of them may be broken."""

    broken = -1

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns["x"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.broken:
            raise ValueError(f"no picture {index}")
        noise = np.array([random.random(), np.random.random(), torch.rand(()).item()], np.float32)
        return {name: column[index] + noise[: len(column[index])] for name, column in self.columns.items()}


class Reader:
    """The same samples as a stream."""

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self.items = Items(columns)

    def __iter__(self) -> Iterator[Any]:
        return (self.items[i] for i in range(len(self.items)))


class Noisy(Wave):
    """Draws random numbers in the model, and from all generators in the loss."""

    source: Callable[[Mapping[str, Any]], Any] = Items

    def model(self) -> nn.Module:
        return nn.Sequential(super().model(), nn.Dropout(0.1))

    def data(self, split: str) -> Any:
        columns = super().data(split)
        return type(self).source(columns) if split == "train" else columns

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return super().loss(outputs, batch) * (1 + random.random() + np.random.random() + torch.rand(()))


class Columns(Noisy):
    source = dict


class Streamed(Noisy):
    source = Reader


class Weighted(Noisy):
    """Loads all micro-batches of a step before the first pass."""

    def loss_weight(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["target"].abs().sum()


TASKS = [Noisy, Columns, Streamed]


def train(folder: Path, task: Any, **settings: Any) -> tuple[dict[str, Tensor], str]:
    """Train one epoch and a part of the next, with validation within them; return the weights and the ledger."""
    folder.mkdir()
    made = distributed.trainer(CPU, task, max_steps=13, validate_every=3, accumulate=2, **settings)
    checksums = SampleChecksums(3, np.zeros(50, np.int64), "")
    ledger = Ledger(folder, CPU, made.order, 0, 1, checksums)
    made.fit(Progress(), CheckpointStore(folder / "checkpoints", 9, {}, CPU), None, ledger=ledger)
    return weights(made), (folder / "ledger.jsonl").read_text()


def assert_equal(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    assert all(torch.equal(tensor, right[name]) for name, tensor in left.items())


@pytest.mark.parametrize(
    ("task", "workers"), [(Noisy, 0), (Noisy, 2), (Columns, 0), (Streamed, 0), (Streamed, 1), (Weighted, 0)]
)
def test_weights_and_ledger_do_not_depend_on_prefetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: type[Noisy], workers: int
) -> None:
    expected, lines = train(tmp_path / "cpu", task(), workers=workers)
    for depth in (0, 3):
        with monkeypatch.context() as patch:
            cuda = FakeCuda(patch)
            patch.setattr("train.trainer.BatchLoader", lambda s, _group, *args: BatchLoader(s, GPU, *args))
            patch.setattr("train.trainer.PREFETCH", depth)
            found, found_lines = train(tmp_path / str(depth), task(), workers=workers)
        assert_equal(found, expected)
        assert found_lines == lines
        assert ("side copies" in cuda.calls, "main copies" in cuda.calls) == (depth > 0, depth == 0)
        assert depth == 0 or all(cuda.used)


@pytest.mark.parametrize("workers", [0, 1])
def test_resumed_run_with_prefetch_has_the_same_bits(tmp_path: Path, cuda: FakeCuda, workers: int) -> None:
    settings = {"epochs": 2, "checkpoint_every": 7, "workers": workers}
    whole, _ = trained(CPU, tmp_path, task=Streamed(), **settings)
    rest, _ = resumed(CPU, tmp_path, 7, task=Streamed(), **settings)
    assert_equal(weights(rest), weights(whole))
    assert all(cuda.used)


def test_next_batch_is_copied_on_a_side_stream_before_the_update(
    tmp_path: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Logged(Noisy):
        def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
            if torch.is_grad_enabled():
                cuda.log("pass")
            return super().loss(outputs, batch)

    update = Trainer._update

    def logged_update(*args: Any) -> None:
        cuda.log("update")
        update(*args)

    monkeypatch.setattr(Trainer, "_update", logged_update)
    trained(CPU, tmp_path, task=Logged(), max_steps=3)
    begin, use = ["side copies"], ["main waits", "recorded", "pass"]
    expected = [*begin, *use, *begin, "update", *use, *begin, "update", *use, "update"]
    assert [call for call, _ in itertools.groupby(cuda.calls)] == expected


def requests(steps: range) -> list[LoadRequest]:
    return [LoadRequest(step, 0, np.arange(4 * step, 4 * step + 4)) for step in steps]


def loader(group: ProcessGroup, task: Noisy, workers: int = 0, prefetch: int = 0) -> BatchLoader:
    return BatchLoader(Samples("train", task.data("train")), group, 1, workers, prefetch)


@pytest.mark.parametrize("task", TASKS)
def test_loading_ahead_does_not_change_the_random_state(cuda: FakeCuda, task: type[Noisy]) -> None:
    made = loader(GPU, task(), prefetch=2)
    before = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
    made.prefetch(requests(range(4)))
    assert len(cuda.copies) == 4
    assert (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()) == before


@pytest.mark.parametrize("workers", [0, 1])
def test_collated_batches_and_their_checksums_do_not_depend_on_prefetch(cuda: FakeCuda, workers: int) -> None:
    def collate(items: Any) -> dict[str, Tensor]:
        return {**default_collate(items), "length": torch.full((len(items),), len(items)) + torch.rand(())}

    found = []
    for group, depth in ((CPU, 0), (GPU, 2)):
        made = BatchLoader(Samples("train", Noisy().data("train"), collate), group, 1, workers, depth)
        made.checksums = SampleChecksums(3, np.zeros(50, np.int64), "")
        wanted = requests(range(5))
        made.start(wanted)
        for i, request in enumerate(wanted):
            batch = made.fetch(request)
            assert batch.checksums is not None
            found.append({**batch.columns, "checksums": batch.checksums})
            made.prefetch(wanted[i + 1 :])
        made.stop()
    for left, right in zip(found[:5], found[5:], strict=True):
        assert_equal(left, right)
    assert cuda.used == [True] * 15


OTHERS = {
    "indices": LoadRequest(0, 0, np.array([0, 1, 2])),
    "step": LoadRequest(1, 0, np.arange(4)),
    "part": LoadRequest(0, 1, np.arange(4)),
    "slice": LoadRequest(0, 0, np.arange(4), slice=1),
    "epoch": LoadRequest(0, 0, np.arange(4), epoch=1),
}


@pytest.mark.parametrize("difference", OTHERS)
@pytest.mark.parametrize("task", TASKS)
def test_batches_of_other_requests_are_dropped(cuda: FakeCuda, task: type[Noisy], difference: str) -> None:
    ahead = loader(GPU, task(), prefetch=2)
    ahead.prefetch(requests(range(2)))
    for request in (OTHERS[difference], *requests(range(2))):
        expected = loader(CPU, task()).fetch(request)
        found = ahead.fetch(request)
        assert_equal(found.columns, expected.columns)
        assert found.indices is request.indices
    assert cuda.used == [False] * 4 + [True] * 6


def test_start_and_stop_drop_what_was_loaded_ahead(cuda: FakeCuda) -> None:
    ahead = loader(GPU, Noisy(), prefetch=1)
    for end in (ahead.stop, lambda: ahead.start(())):
        ahead.prefetch(requests(range(1)))
        end()
        ahead.fetch(*requests(range(1)))
    assert cuda.used == [False, False, True, True] * 2


@pytest.mark.parametrize("workers", [0, 1])
def test_failure_is_raised_when_its_batch_is_fetched(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], workers: int
) -> None:
    monkeypatch.setattr(Items, "broken", 9)
    messages = []
    for group, depth in ((CPU, 0), (GPU, 4)):
        made, wanted = loader(group, Noisy(), workers, depth), requests(range(4))
        made.start(wanted)
        made.fetch(wanted[0])
        made.prefetch(wanted[1:])
        made.fetch(wanted[1])
        assert capfd.readouterr().err == ""
        with pytest.raises(StageError if workers else ValueError, match="no picture 9") as caught:
            made.fetch(wanted[2])
        messages.append((describe(caught.value, Path(__file__).parent), "Traceback" in capfd.readouterr().err))
        made.stop()
    assert messages[0] == messages[1]
    assert len(cuda.copies) == 4  # of two batches: nothing is loaded after a failure


def test_failure_of_a_batch_that_is_not_needed_is_not_raised(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Items, "broken", 1)
    made = loader(GPU, Noisy(), prefetch=1)
    made.prefetch(requests(range(1)))
    made.fetch(*requests(range(1, 2)))
    assert cuda.used == [True, True]


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_loading_ahead_counts_as_waiting(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    """Loading in this process takes time from the training, whenever it happens."""
    seconds = itertools.count()
    load = Items.__getitem__
    clock = [0.0]
    monkeypatch.setattr("train.data.time.perf_counter", lambda: clock[0])

    def slow(items: Items, index: int) -> dict[str, Any]:
        clock[0] = float(next(seconds)) + 1
        return load(items, index)

    monkeypatch.setattr(Items, "__getitem__", slow)
    made, wanted = loader(GPU, Noisy(), prefetch=depth), requests(range(5))
    for i, request in enumerate(wanted):
        made.fetch(request)
        made.prefetch(wanted[i + 1 :])
    assert made.waited_seconds == 20
    assert cuda.copies


def test_nothing_is_loaded_ahead_on_a_cpu_or_with_measured_slices(cuda: FakeCuda) -> None:
    announced = iter(requests(range(3)))
    on_cpu = loader(CPU, Noisy(), prefetch=2)
    on_cpu.prefetch(announced)
    assert len(list(announced)) == 3
    balanced = distributed.trainer(CPU, Noisy(), balance="auto")
    equal = distributed.trainer(CPU, Noisy())
    assert [made.prefetches for made in (on_cpu, balanced._loader, equal._loader)] == [False, False, True]
    assert not cuda.copies
