from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from benchmarks.train.copying import Copying
from benchmarks.train.race import Course, Lap
from benchmarks.train.racer import contestant
from benchmarks.train.saving import line, row_of
from pipeline.system.processes import Rank
from train.process_group import ProcessGroup
from train.state import Progress, State


def test_cost_of_a_checkpoint_is_compared_with_copying_its_bytes() -> None:
    course = Course("digits", processes=2, threads=1, lap=10, warm_laps=0, laps=2)
    plain, copied, saved = (
        [Lap(seconds * load, cpu) for load in (1, 3)] for seconds, cpu in ((1.0, 0.5), (1.1, 0.55), (1.2, 0.6))
    )
    row = row_of(course, [{"ours": plain, "copying": copied, "saving": saved}])
    assert (row.copying, row.saving) == (1.1, 1.2)
    assert (row.cpu_ms, row.copying_cpu_ms, row.saving_cpu_ms) == (50.0, 55.0, 60.0)
    assert row.beyond == pytest.approx(0.1)
    assert line(row).split()[-1] == "10.0%"


def test_saving_contestant_saves_after_every_step() -> None:
    found = contestant("saving")
    assert isinstance(found, functools.partial)
    assert found.keywords == {"checkpoint_every": 1, "make_store": None}


def test_copying_writes_each_process_its_share_of_the_bytes(tmp_path: Path) -> None:
    for rank in (0, 1):
        with Copying(tmp_path, ProcessGroup(Rank(rank, world_size=2), torch.device("cpu"))) as store:
            store.save(State(Progress(1), {"a": torch.ones(7), "b": torch.tensor(2.0)}))
        store._thread.join(10)
        assert (tmp_path / str(rank)).stat().st_size == 4 * (4 + 1)
