from __future__ import annotations

import json
import math
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.contract.settings.stages import Train
from pipeline.system.errors import DataError, LostContact
from train.checkpoint.load import SavedCheckpoint
from train.checkpoint.store import CheckpointStore
from train.metrics import MetricsLog
from train.optim import make_optimizer
from train.parameter_server import ParameterServerTrainer, Result, Server, Tally, Work
from train.process_group import ProcessGroup, is_lost_contact
from train.state import Progress

from ..conftest import Project, equal, journal
from ..distributed import Wave, resumed, run_distributed, trainer, weights

SETTINGS: dict[str, Any] = {"strategy": "parameter_server", "epochs": 4, "log_every": 3}


class Interrupted(Wave):
    """Calls a function with the loss of every training pass."""

    def __init__(self, action: Any) -> None:
        self.action = action

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        loss = super().loss(outputs, batch)
        return self.action(loss) if torch.is_grad_enabled() else loss


def sleep(loss: Tensor) -> Tensor:
    time.sleep(0.5)
    return loss


@pytest.mark.long
def test_slow_worker_does_not_slow_others(tmp_path: Path) -> None:
    for saved, updates in run_distributed(train_with_slow_worker, 2, tmp_path):
        assert saved
        assert updates == 40
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    results = [line for line in lines if "loss" in line]
    by_rank: Counter[str] = Counter()
    for line in results:
        by_rank.update(line["steps_by_rank"])
        assert line["staleness"]["max"] <= 2
    assert by_rank.total() == 40
    assert by_rank["0"] >= 30
    assert by_rank["1"] >= 4, "at least the step it holds when all others are done"
    assert sum(line["redone"] for line in results) > 0
    assert [line["step"] for line in results] == [step for step in range(1, 41) if step % 3 == 0 or step % 10 == 0]


def train_with_slow_worker(group: ProcessGroup, directory: Path) -> tuple[bool, int]:
    """Return whether the last checkpoint has the weights of all processes, and its number of updates."""
    ParameterServerTrainer.MAX_STALENESS = 2
    fresh = trainer(group, Interrupted(sleep) if group.rank.rank == 1 else None, **SETTINGS)
    store = CheckpointStore(directory / "checkpoints", 9, {}, group)
    fresh.fit(Progress(), store, MetricsLog(directory, 0) if group.rank.first else None)
    saved = store.load(40)
    return equal(saved.tensors("weights."), weights(fresh)), updates_of(saved)


def updates_of(saved: SavedCheckpoint) -> int:
    """Return the optimizer's own count."""
    (count,) = {int(tensor) for name, tensor in saved.tensors("optimizer.").items() if name.endswith(".step")}
    return count


def test_run_learns_and_resumes_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    for loss, updates in run_distributed(train_and_resume, 3, tmp_path):
        assert loss < 0.05  # the targets vary by 0.36
        assert updates == 80


def train_and_resume(group: ProcessGroup, directory: Path) -> tuple[float, int]:
    settings = {**SETTINGS, "epochs": 8}
    store = CheckpointStore(directory, 9, {}, group)
    trainer(group, **settings).fit(Progress(), store, None)
    _, progress = resumed(group, directory, 40, **settings)
    assert progress.best_loss is not None
    return progress.best_loss, updates_of(store.load(80))


def die(loss: Tensor) -> Tensor:
    os._exit(1)


def hang(loss: Tensor) -> Tensor:
    os.kill(os.getpid(), signal.SIGSTOP)
    return loss


@pytest.mark.parametrize("action", [die, hang])
def test_dead_or_hanging_worker_ends_all_with_a_clear_error(action: Any) -> None:
    results = run_distributed(train_beside_failing_worker, 3, action, lost=[1])
    assert results[0] == "rank 1 ended, or sent no gradient within train.timeout_seconds; see the log"
    assert results[1] == "lost contact"


def train_beside_failing_worker(group: ProcessGroup, action: Any) -> str:
    fresh = trainer(group, Interrupted(action) if group.rank.rank == 1 else None, **SETTINGS, timeout_seconds=4)
    try:
        fresh.fit(Progress(), CheckpointStore(Path("/nowhere"), 9, {}, group), None)
    except LostContact as error:
        return str(error)
    except RuntimeError as error:
        return "lost contact" if is_lost_contact(error) else str(error)
    return "no error"


def test_loss_that_is_not_finite_is_reported_with_step_and_rank() -> None:
    results = run_distributed(train_with_broken_loss, 2, lost=[0])
    assert "the loss is not finite at step" in results[0]
    assert "on rank 1;" in results[0]


def return_nan(loss: Tensor) -> Tensor:
    return loss * math.nan


def train_with_broken_loss(group: ProcessGroup) -> str:
    fresh = trainer(group, Interrupted(return_nan) if group.rank.rank == 1 else None, **SETTINGS)
    with pytest.raises(DataError) as caught:
        fresh.fit(Progress(), CheckpointStore(Path("/nowhere"), 9, {}, group), None)
    return str(caught.value)


def test_train_step_runs_the_parameter_server(project: Project) -> None:
    run = project.run(strategy="parameter_server")
    done = project.train(run, processes=2)
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in journal(run) if "loss" in line] == list(range(1, 16))
    assert (run.partial("train") / "model.safetensors").exists()


def make_server(staleness: int, steps: int = 10) -> tuple[Server, nn.Parameter, list[Tally]]:
    """Return a server of one weight, which a gradient of 1 lowers by the learning rate of the update: 1, 2, 3, …"""
    weight = nn.Parameter(torch.zeros(1))
    tallies: list[Tally] = []

    def updated(updates: int, tally: Tally) -> bool:
        if updates % 5 == 0:
            tallies.append(tally)
        return updates % 5 == 0

    module = nn.ParameterList([weight])
    optimizer = make_optimizer(module, Train(optimizer="sgd", momentum=0, weight_decay=0))
    server = Server([weight], optimizer, lambda updates: updates + 1.0, staleness, updated)
    server.open(range(steps))
    return server, weight, tallies


def take_work(server: Server, rank: int, result: Result | None = None) -> Work:
    work = server.exchange(rank, result)
    assert work is not None
    return work


def result_of(work: Work, gradient: Tensor | None = None) -> Result:
    return Result(work.step, work.version, 4, 2.0, 1.0, torch.ones(1) if gradient is None else gradient)


def test_single_worker_makes_every_step_in_order() -> None:
    server, weight, tallies = make_server(staleness=0)
    work = server.exchange(0, None)
    for step in range(10):
        assert work is not None
        assert (work.step, work.version) == (step, step)
        assert float(work.weights) == -sum(range(step + 1))
        work = server.exchange(0, result_of(work))
    assert work is None
    assert weight.item() == -55
    assert [(tally.samples, tally.loss, tally.redone) for tally in tallies] == [(20, 40.0, 0)] * 2
    assert [dict(tally.steps_by_rank) for tally in tallies] == [{0: 5}] * 2


def test_gradient_beyond_max_staleness_is_computed_again() -> None:
    server, weight, tallies = make_server(staleness=2)
    early, late = take_work(server, 1), take_work(server, 2)
    own = take_work(server, 0)
    for _ in range(2):
        own = take_work(server, 0, result_of(own))
    other = take_work(server, 1, result_of(early))  # two updates old
    assert server.updates == 3
    again = take_work(server, 2, result_of(late))  # three updates old
    assert (again.step, again.version) == (late.step, 3)
    assert float(again.weights) == weight.item()
    assert server.updates == 3
    take_work(server, 2, result_of(again))
    take_work(server, 0, result_of(own))
    assert tallies[0].redone == 1
    assert tallies[0].staleness == [0, 0, 2, 0, 2]
    assert dict(tallies[0].steps_by_rank) == {0: 3, 1: 1, 2: 1}
    assert other.step == 5


def test_worker_gets_its_step_again_when_no_other_is_left() -> None:
    server, _, _ = make_server(staleness=0, steps=2)
    one, two = take_work(server, 0), take_work(server, 1)
    assert server.exchange(0, result_of(one)) is None
    again = take_work(server, 1, result_of(two))
    assert again.step == 1
    assert server.exchange(1, result_of(again)) is None
    assert server.updates == 2


def test_failed_server_raises_its_first_error_to_all() -> None:
    server, _, _ = make_server(staleness=0)
    server.fail(ValueError("first"))
    server.fail(ValueError("second"))
    with pytest.raises(ValueError, match="first"):
        server.exchange(0, None)
    with pytest.raises(ValueError, match="first"):
        server.check()
