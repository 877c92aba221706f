from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from pipeline.contract.data import Samples
from pipeline.system.errors import StageError
from pipeline.system.processes import Rank
from train.data import BatchLoader, LoadRequest, fits_on_gpu
from train.process_group import ProcessGroup

from .conftest import Project, failure

CPU = ProcessGroup(Rank(), torch.device("cpu"))


class Noisy(Dataset[dict[str, Any]]):
    """A dataset that draws from every generator that an augmentation may use."""

    broken: tuple[int, ...] = ()

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in self.broken:
            raise ValueError(f"no picture {index}")
        return {"x": torch.tensor([index, random.random(), np.random.random(), torch.rand(()).item()])}


def jobs(steps: range, parts: int = 1) -> list[LoadRequest]:
    found = [(step, part) for step in steps for part in range(parts)]
    return [LoadRequest(step, part, np.arange(3) + 3 * (step % 5) + part) for step, part in found]


def fetched(workers: int, wanted: list[LoadRequest], seed: int = 1) -> list[Tensor]:
    feed = BatchLoader(Samples("train", Noisy()), CPU, seed, workers)
    feed.start(wanted)
    try:
        return [feed.fetch(job).columns["x"] for job in wanted]
    finally:
        feed.stop()


def test_workers_load_the_same_batches_as_the_main_process() -> None:
    wanted = jobs(range(6), parts=2)
    found = [torch.stack(fetched(workers, wanted)) for workers in (0, 1, 2)]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("workers", [0, 2])
def test_loading_from_the_middle_gives_the_same_batches(workers: int) -> None:
    whole, rest = fetched(workers, jobs(range(6))), fetched(workers, jobs(range(4, 6)))
    assert torch.equal(torch.stack(whole[4:]), torch.stack(rest))


def test_random_numbers_depend_on_seed_step_part_and_slice() -> None:
    same = np.arange(3)
    found = [
        fetched(0, [LoadRequest(step, part, same, number)], seed)[0][:, 1:]
        for seed, step, part, number in ((1, 2, 3, 0), (2, 2, 3, 0), (1, 3, 3, 0), (1, 2, 2, 0), (1, 2, 3, 1))
    ]
    for i, left in enumerate(found):
        assert not any((left == right).any() for right in found[i + 1 :])


@pytest.mark.parametrize("workers", [0, 1])
def test_loading_samples_does_not_change_the_models_random_numbers(workers: int) -> None:
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    expected = torch.rand(2), np.random.random(), random.random()
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    fetched(workers, jobs(range(2)))
    found = torch.rand(2), np.random.random(), random.random()
    assert torch.equal(found[0], expected[0])
    assert found[1:] == expected[1:]


def test_an_exception_in_a_worker_is_reported_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Noisy, "broken", (4,))
    with pytest.raises(StageError, match=r"^ValueError: no picture 4 \(test_data\.py, line \d+\)$"):
        fetched(2, jobs(range(4)))


def test_batches_are_loaded_in_process_before_workers_start() -> None:
    """Trial and warm-up passes take a batch or two, in any order."""
    feed = BatchLoader(Samples("train", Noisy()), CPU, seed=1, workers=2)
    for job in reversed(jobs(range(3))):
        assert torch.equal(feed.fetch(job).columns["x"], fetched(0, [job])[0])


def test_columns_are_indexed_in_order_without_workers() -> None:
    columns = {"x": torch.arange(40.0).reshape(20, 2), "mask": torch.arange(20) % 2 == 0}
    feed = BatchLoader(Samples("train", columns), CPU, seed=0, workers=2)
    feed.start(iter(()))
    found = feed.fetch(LoadRequest(0, 0, np.array([7, 3, 3]))).columns
    assert found["x"].tolist() == [[14, 15], [6, 7], [6, 7]]
    assert found["mask"].tolist() == [False, False, False]


def test_only_small_columns_move_to_the_gpu() -> None:
    assert fits_on_gpu(1 << 30, 10 << 30)
    assert not fits_on_gpu(3 << 30, 10 << 30)


SPY = """
import sys, time, numpy as np, torch
from train.data import LoaderWorkers
from types import SimpleNamespace as LoadRequest

def load(job):
    return {"x": torch.zeros(1)}

workers = LoaderWorkers(load, (LoadRequest(step=i, slice=0, part=0) for i in range(10**6)), 2, pinned=False)
workers.next(LoadRequest(step=0, slice=0, part=0))
import multiprocessing
print(*[child.pid for child in multiprocessing.active_children()], flush=True)
time.sleep(60)
"""

# The same samples as columns, drawn one by one with noise.
DRAWN = """
    def data(self, split):
        return Drawn(self.columns(split))

    def columns(self, split):"""
DATA_SET = """

class Drawn(torch.utils.data.Dataset):
    def __init__(self, columns):
        self.columns = columns

    def __len__(self):
        return len(self.columns["x"])

    def __getitem__(self, index):
        found = {name: column[index] for name, column in self.columns.items()}
        return {**found, "x": found["x"] + np.random.normal(size=3).astype(np.float32) / 10}
"""


@pytest.fixture
def drawn(project: Project) -> Project:
    project.replace("\n    def data(self, split):", DRAWN)
    path = project.root / "task.py"
    path.write_text(path.read_text() + DATA_SET)
    return project


@pytest.mark.long
def test_workers_end_when_the_training_process_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", SPY], stdout=subprocess.PIPE, text=True) as spy:
        assert spy.stdout is not None
        workers = [psutil.Process(int(word)) for word in spy.stdout.readline().split()]
        assert len(workers) == 2
        spy.kill()
    _, alive = psutil.wait_procs(workers, timeout=300)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def test_a_worker_that_is_killed_is_named_as_such(drawn: Project) -> None:
    in_worker(drawn, "os.kill(os.getpid(), 9)")
    run = drawn.run(workers=1)
    assert drawn.train(run).returncode != 0
    assert "killed" in str(failure(run))


def in_worker(drawn: Project, deed: str) -> None:
    """Let a worker, but not the training process, run a statement at the sample of index 3."""
    lines = ["import os", "if torch.utils.data.get_worker_info() and index == 3:", f"    {deed}"]
    drawn.replace("        found = {name", "".join(f"        {line}\n" for line in lines) + "        found = {name")
