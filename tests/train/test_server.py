from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from train.server import Result, Server, Tally, Work


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
