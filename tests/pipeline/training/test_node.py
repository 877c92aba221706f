"""A machine finds the meeting that is held, never the one before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.contract.settings.stages import Train
from pipeline.service.process import any_port
from pipeline.training import node
from pipeline.training.launchers import Meeting
from pipeline.training.node import Machine
from pipeline.training.rendezvous import answers, publish, published

from ..conftest import NewRun


def machine(new_run: NewRun, root: Path) -> Machine:
    address = f"127.0.0.1:{any_port()}"
    train = Train(nodes=2, rendezvous=address, timeout_seconds=5, processes=1)
    run = new_run()
    run.partial("train").mkdir(parents=True)
    run.log("train").parent.mkdir(exist_ok=True)
    return Machine(run, root, os.environ, joined=False, train=train)


def test_the_name_of_an_earlier_meeting_is_gone_before_the_store_of_the_next_one_answers(
    new_run: NewRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leading = machine(new_run, tmp_path)
    publish(leading.run, leading.train.rendezvous)
    told: list[Meeting | None] = []

    def knock(address: str) -> bool:
        told.append(published(leading.run))
        return answers(address)

    monkeypatch.setattr(node, "answers", knock)
    with leading.store() as meeting:
        assert published(leading.run) == meeting
    assert set(told) == {None}


def test_a_meeting_that_is_held_anew_while_somebody_knocks_is_the_one_that_counts(
    new_run: NewRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joining = machine(new_run, tmp_path)
    made = [publish(joining.run, joining.train.rendezvous)]

    def knock(address: str) -> bool:
        if len(made) == 1:
            made.append(publish(joining.run, address))
        return True

    monkeypatch.setattr(node, "answers", knock)
    assert joining.wait_for_meeting(took_part=False) == made[-1]
    assert len(made) == 2
