from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from .conftest import Project, equal, failure, weights

SPY = """
import sys, time, numpy as np, torch
from train.workers import Workers
from types import SimpleNamespace as Job

def load(job):
    return {"x": torch.zeros(1)}

workers = Workers(load, (Job(step=i, slice=0, part=0) for i in range(10**6)), 2, pinned=False)
workers.next(Job(step=0, slice=0, part=0))
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


def test_workers_end_when_the_training_process_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", SPY], stdout=subprocess.PIPE, text=True) as spy:
        assert spy.stdout is not None
        workers = [psutil.Process(int(word)) for word in spy.stdout.readline().split()]
        assert len(workers) == 2
        spy.kill()
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def test_training_with_workers_gives_the_weights_of_training_without(drawn: Project) -> None:
    one, two = drawn.run("one", accumulate=2), drawn.run("two", accumulate=2, workers=2)
    for run in (one, two):
        done = drawn.train(run, processes=2)
        assert done.returncode == 0, done.stderr
    assert equal(weights(one), weights(two))


def test_a_sample_that_cannot_be_loaded_stops_the_run_with_its_line(drawn: Project) -> None:
    in_worker(drawn, "raise ValueError('torn')")
    run = drawn.run(workers=1)
    assert drawn.train(run).returncode != 0
    assert str(failure(run)).startswith("ValueError: torn (task.py, line")


def test_a_worker_that_is_killed_is_named_as_such(drawn: Project) -> None:
    in_worker(drawn, "os.kill(os.getpid(), 9)")
    run = drawn.run(workers=1)
    assert drawn.train(run).returncode != 0
    assert "killed" in str(failure(run))


def in_worker(drawn: Project, deed: str) -> None:
    """What a worker, and not the training process, does at the sample of index 3."""
    lines = ["import os", "if torch.utils.data.get_worker_info() and index == 3:", f"    {deed}"]
    drawn.replace("        found = {name", "".join(f"        {line}\n" for line in lines) + "        found = {name")
