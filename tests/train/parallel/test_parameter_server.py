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

from pipeline.contract.errors import DataError, LostContact
from train.checkpoint.load import Saved
from train.checkpoint.store import CheckpointStore
from train.metrics import Journal
from train.parameter_server import Result, Server, Tally, Work
from train.process_group import Group, lost_contact
from train.state import Progress

from ..conftest import Project, equal, journal
from ..together import Wave, resumed, together, trainer, weights

WORDS: dict[str, Any] = {"sync": "parameter_server", "epochs": 4, "log_every": 3, "staleness": 2}


class Odd(Wave):
    """While training, something happens in one process."""

    def __init__(self, then: Any) -> None:
        self.then = then

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        loss = super().loss(outputs, batch)
        return self.then(loss) if torch.is_grad_enabled() else loss


def sleeping(loss: Tensor) -> Tensor:
    time.sleep(0.5)
    return loss


def test_a_slow_worker_slows_nobody_and_every_step_is_applied_once(tmp_path: Path) -> None:
    for saved, updates in together(with_a_slow_worker, 2, tmp_path):
        assert saved
        assert updates == 40
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    told = [line for line in lines if "loss" in line]
    by_rank: Counter[str] = Counter()
    for line in told:
        by_rank.update(line["steps_by_rank"])
        assert line["staleness"]["max"] <= 2
    assert by_rank.total() == 40
    assert by_rank["0"] >= 30
    assert by_rank["1"] >= 4, "at least the step it holds when all others are done"
    assert sum(line["redone"] for line in told) > 0
    assert [line["step"] for line in told] == [step for step in range(1, 41) if step % 3 == 0 or step % 10 == 0]


def with_a_slow_worker(group: Group, directory: Path) -> tuple[bool, int]:
    """Whether the last checkpoint holds the weights that all have, and how many updates made them."""
    made = trainer(group, Odd(sleeping) if group.rank.rank == 1 else None, **WORDS)
    store = CheckpointStore(directory / "checkpoints", 9, {}, group)
    made.fit(Progress(), store, Journal(directory, 0) if group.rank.first else None)
    saved = store.load(40)
    return equal(saved.whole("weights."), weights(made)), updates_of(saved)


def updates_of(saved: Saved) -> int:
    """As the optimizer counted them."""
    (count,) = {int(tensor) for name, tensor in saved.whole("optimizer.").items() if name.endswith(".step")}
    return count


def test_it_learns_and_goes_on_from_the_end_of_an_epoch(tmp_path: Path) -> None:
    for loss, updates in together(whole_run, 3, tmp_path):
        assert loss < 0.05  # the targets vary by 0.36
        assert updates == 80


def whole_run(group: Group, directory: Path) -> tuple[float, int]:
    words = {**WORDS, "epochs": 8, "staleness": 8}
    store = CheckpointStore(directory, 9, {}, group)
    trainer(group, **words).fit(Progress(), store, None)
    _, progress = resumed(group, directory, 40, **words)
    assert progress.best_loss is not None
    return progress.best_loss, updates_of(store.load(80))


def ending(loss: Tensor) -> Tensor:
    os._exit(1)


def stopping(loss: Tensor) -> Tensor:
    os.kill(os.getpid(), signal.SIGSTOP)
    return loss


@pytest.mark.parametrize("then", [ending, stopping])
def test_a_worker_that_ends_or_hangs_ends_the_others_with_a_clear_error(then: Any) -> None:
    told = together(beside_one_that_fails, 3, then, lost=[1])
    assert told[0] == "rank 1 ended, or sent no gradient within train.timeout_seconds; the log tells which"
    assert told[1] == "lost contact"


def beside_one_that_fails(group: Group, then: Any) -> str:
    made = trainer(group, Odd(then) if group.rank.rank == 1 else None, **WORDS, timeout_seconds=4)
    started = time.monotonic()
    try:
        made.fit(Progress(), CheckpointStore(Path("/nowhere"), 9, {}, group), None)
    except LostContact as error:
        assert time.monotonic() - started < 20
        return str(error)
    except RuntimeError as error:
        return "lost contact" if lost_contact(error) else str(error)
    return "no error"


def test_a_loss_that_is_not_finite_is_told_with_its_step_and_rank() -> None:
    told = together(with_a_loss_that_breaks, 2, lost=[0])
    assert "the loss is not finite at step" in told[0]
    assert "on rank 1;" in told[0]


def breaking(loss: Tensor) -> Tensor:
    return loss * math.nan


def with_a_loss_that_breaks(group: Group) -> str:
    made = trainer(group, Odd(breaking) if group.rank.rank == 1 else None, **WORDS)
    with pytest.raises(DataError) as caught:
        made.fit(Progress(), CheckpointStore(Path("/nowhere"), 9, {}, group), None)
    return str(caught.value)


def test_the_train_step_runs_it(project: Project) -> None:
    run = project.run(sync="parameter_server")
    done = project.train(run, processes=2)
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in journal(run) if "loss" in line] == list(range(1, 16))
    assert (run.partial("train") / "model.safetensors").exists()


def serving(staleness: int, steps: int = 10) -> tuple[Server, nn.Parameter, list[Tally]]:
    """One weight that every gradient of 1 lowers by the rate of its update: 1, 2, 3, …"""
    weight = nn.Parameter(torch.zeros(1))
    tallies: list[Tally] = []

    def updated(updates: int, tally: Tally) -> bool:
        if updates % 5 == 0:
            tallies.append(tally)
        return updates % 5 == 0

    optimizer = torch.optim.SGD([weight], lr=0.0)
    server = Server([weight], optimizer, lambda updates: updates + 1.0, staleness, updated)
    server.open(range(steps))
    return server, weight, tallies


def taken(server: Server, rank: int, result: Result | None = None) -> Work:
    work = server.trade(rank, result)
    assert work is not None
    return work


def found(work: Work, gradient: Tensor | None = None) -> Result:
    return Result(work.step, work.version, 4, 2.0, 1.0, torch.ones(1) if gradient is None else gradient)


def test_one_worker_makes_every_step_in_order_with_the_rate_of_each_update() -> None:
    server, weight, tallies = serving(staleness=0)
    work = server.trade(0, None)
    for step in range(10):
        assert work is not None
        assert (work.step, work.version) == (step, step)
        assert float(work.weights) == -sum(range(step + 1))
        work = server.trade(0, found(work))
    assert work is None
    assert weight.item() == -55
    assert [(tally.samples, tally.loss, tally.redone) for tally in tallies] == [(20, 40.0, 0)] * 2
    assert [dict(tally.steps_by_rank) for tally in tallies] == [{0: 5}] * 2


def test_a_gradient_within_the_bound_is_applied_and_one_beyond_it_is_done_again_with_fresh_weights() -> None:
    server, weight, tallies = serving(staleness=2)
    early, late = taken(server, 1), taken(server, 2)
    mine = taken(server, 0)
    for _ in range(2):
        mine = taken(server, 0, found(mine))
    other = taken(server, 1, found(early))  # two updates old
    assert server.updates == 3
    again = taken(server, 2, found(late))  # three updates old
    assert (again.step, again.version) == (late.step, 3)
    assert float(again.weights) == weight.item()
    assert server.updates == 3
    taken(server, 2, found(again))
    taken(server, 0, found(mine))
    assert tallies[0].redone == 1
    assert tallies[0].staleness == [0, 0, 2, 0, 2]
    assert dict(tallies[0].steps_by_rank) == {0: 3, 1: 1, 2: 1}
    assert other.step == 5


def test_a_worker_with_a_step_to_do_again_gets_it_though_no_other_step_is_left() -> None:
    server, _, _ = serving(staleness=0, steps=2)
    one, two = taken(server, 0), taken(server, 1)
    assert server.trade(0, found(one)) is None
    again = taken(server, 1, found(two))
    assert again.step == 1
    assert server.trade(1, found(again)) is None
    assert server.updates == 2


def test_after_a_failure_nobody_gets_work_and_the_first_error_is_told() -> None:
    server, _, _ = serving(staleness=0)
    server.fail(ValueError("first"))
    server.fail(ValueError("second"))
    with pytest.raises(ValueError, match="first"):
        server.trade(0, None)
    with pytest.raises(ValueError, match="first"):
        server.check()
