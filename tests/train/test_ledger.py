from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from pipeline.contract.chaos import CHAOS_VARIABLE, ChaosLog, Kill, KillPoint
from pipeline.contract.run import Run
from pipeline.system.errors import ResourceError
from pipeline.system.processes import Rank
from pipeline.verify import ledger_verification, verify_run_ledger
from tests.train.distributed import run_distributed, trainer
from train.batch_order import BatchOrder
from train.checkpoint.store import CheckpointStore
from train.ledger import Ledger, read_lines, verify_ledger
from train.parameter_server import ParameterServerTrainer
from train.process_group import ProcessGroup
from train.state import Progress

from ..quick import quick
from .conftest import Project

ORDER = BatchOrder(samples=37, batch_size=8, seed=0)
CPU = torch.device("cpu")


def ledger(directory: Path, resumed: int = 0, attempt: int = 1) -> Ledger:
    return Ledger(directory, ProcessGroup(Rank(), CPU), ORDER, resumed, attempt)


def feed(made: Ledger, *steps: int) -> None:
    """Record the steps, each in two micro-batches."""
    for step in steps:
        half = ORDER.size(step) // 2
        made.record(step, ORDER.batch(step)[:half])
        made.record(step, ORDER.batch(step)[half:])


def commit(made: Ledger) -> None:
    write = made.collect()
    assert write is not None
    write()


def proven(directory: Path, steps: int) -> str:
    return verify_ledger(read_lines(directory / "ledger.jsonl"), ORDER, steps).fault


def test_micro_batches_of_a_step_are_one_line(tmp_path: Path) -> None:
    made = ledger(tmp_path)
    feed(made, 0, 1, 2)
    commit(made)
    feed(made, 3, 4)
    commit(made)
    assert proven(tmp_path, 5) == ""


def test_nothing_is_written_before_its_checkpoint_is(tmp_path: Path) -> None:
    made = ledger(tmp_path)
    feed(made, 0, 1)
    made.collect()
    assert read_lines(tmp_path / "ledger.jsonl") == []


def test_lines_of_a_failed_checkpoint_are_written_with_the_next(tmp_path: Path) -> None:
    made = ledger(tmp_path)
    feed(made, 0, 1)
    made.collect()
    feed(made, 2)
    commit(made)
    assert proven(tmp_path, 3) == ""


def test_a_discarded_and_repeated_step_counts_once(tmp_path: Path) -> None:
    made = ledger(tmp_path)
    feed(made, 0)
    made.discard(0)
    feed(made, 0)
    commit(made)
    assert proven(tmp_path, 1) == ""


def test_ledger_records_the_samples_that_were_used(tmp_path: Path) -> None:
    made = ledger(tmp_path)
    made.record(0, ORDER.batch(0)[::-1])
    commit(made)
    assert proven(tmp_path, 1) == "line 1: step 1 was trained on samples that no step has"


@pytest.mark.parametrize("resumed", [0, 3, 5])
@pytest.mark.parametrize("harm", ["", '{"step": 6, "epo', "\x00\x00\n", '{"step": "six"}\n'])
def test_lines_of_repeated_steps_and_half_lines_are_dropped(
    tmp_path: Path, harm: str, resumed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    made = ledger(tmp_path)
    feed(made, *range(5))
    commit(made)
    with (tmp_path / "ledger.jsonl").open("a") as file:
        file.write(harm)
    again = ledger(tmp_path, resumed, attempt=2)
    assert proven(tmp_path, resumed) == ""
    feed(again, *range(resumed, 10))
    commit(again)
    assert proven(tmp_path, 10) == ""
    assert capsys.readouterr().err == ""


def test_missing_lines_of_the_checkpoint_are_reported_at_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = ledger(tmp_path)
    feed(made, 0, 1)
    commit(made)
    ledger(tmp_path, resumed_step := 3)
    assert f"has 2 lines for the {resumed_step} steps of the checkpoint" in capsys.readouterr().err


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ledger(tmp_path)
    feed(made, 0)
    write = made.collect()
    assert write is not None

    def no_space(_: int) -> NoReturn:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(ResourceError, match=r"cannot write .*ledger.jsonl: no space left"):
        write()


CREWS: dict[str, tuple[int, dict[str, Any]]] = {
    "micro-batches": (3, {"accumulate": 2}),
    "shares that change": (2, {"balance": "auto"}),
    "cut layers": (2, {"strategy": "fsdp", "accumulate": 3}),
    "rows of stages": (2, {"pipeline_parallel": 2, "accumulate": 2}),
    "far apart": (2, {"strategy": "local_sgd"}),
    "a parameter server": (3, {"strategy": "parameter_server", "epochs": 2}),
}


@pytest.mark.parametrize("crew", quick(["shares that change", "cut layers", "a parameter server"], CREWS))
def test_lines_match_the_plan_for_every_strategy(tmp_path: Path, crew: str) -> None:
    """Two epochs of 10 steps; the 149 samples are divided by no number of processes."""
    size, words = CREWS[crew]
    orders = run_distributed(kept, size, tmp_path, words)
    proof = verify_ledger(read_lines(tmp_path / "ledger.jsonl"), orders[0], 20)
    assert (proof.fault, proof.lost, proof.repeated, proof.processes) == ("", 0, 0, (size, size))


def kept(group: ProcessGroup, directory: Path, words: dict[str, Any]) -> BatchOrder:
    group = ProcessGroup(group.rank, group.device, words.get("pipeline_parallel", 1))
    ParameterServerTrainer.MAX_STALENESS = 0
    made = trainer(group, **{"epochs": 2, **words})
    book = Ledger(directory, group, made.order, 0, attempt=1)
    made.fit(Progress(), CheckpointStore(directory / "checkpoints", 9, {}, group), None, ledger=book)
    return made.order


def killed(project: Project, run: Run, place: KillPoint, processes: int) -> None:
    """Train until a process is killed at this place after the seventh step; every second step has a checkpoint."""
    folder = project.root / "chaos"
    ChaosLog(folder).write_schedule([Kill(place=place, step=7, rank=processes - 1 if place == "step" else 0)])
    done = project.train(run, processes, **{CHAOS_VARIABLE: str(folder)})
    assert done.returncode == -9, done.stderr


@pytest.mark.parametrize(
    ("place", "processes"),
    [("step", 1), *(pytest.param(*case, marks=pytest.mark.long) for case in (("step", 3), ("ledger", 2)))],
)
def test_every_sample_counts_once_after_a_kill_and_another_world_size(
    project: Project, place: KillPoint, processes: int
) -> None:
    run = project.run(checkpoint_every=2)
    killed(project, run, place, processes=2)
    assert "training is unfinished, verified up to " in next(verify_run_ledger(run))
    done = project.train(run, processes)
    assert done.returncode == 0, done.stderr
    assert "resumed from the checkpoint of step" in done.stdout
    proof = ledger_verification(run)
    assert (proof.fault, proof.lost, proof.repeated, proof.attempts) == ("", 0, 0, 2)
    assert proof.processes == (min(2, processes), max(2, processes))
    assert next(verify_run_ledger(run)).startswith("ledger: 15 steps, 3 epochs, every one of 37 samples exactly once")
