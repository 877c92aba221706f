from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Literal

import psutil
import pytest

from pipeline.chaos.campaign import ReferenceTiming, choose_victim, next_scheduled_kill
from pipeline.contract.chaos import ChaosEvent, Kill

TIMING = ReferenceTiming(start_seconds=4.0, hold_seconds=0.6)


def event(kind: str, time: float, **more: int) -> ChaosEvent:
    return ChaosEvent.model_validate({"event": kind, "time": time, **more})


def due_at(kills: list[Kill], events: list[ChaosEvent]) -> float | None:
    found = next_scheduled_kill(kills, TIMING, events, 10.0)
    return found[0] if found else None


def test_kill_at_a_step_is_never_due_from_outside() -> None:
    assert due_at([Kill(place="step", step=1)], []) is None


def test_random_kill_happens_within_the_held_steps() -> None:
    kills = [Kill(place="moment", who="pipe", step=1, share=0.5)]
    assert due_at(kills, [event("born", 11.0)]) is None
    assert due_at(kills, [event("ready", 12.0, number=0)]) == pytest.approx(12.3)


def test_start_kill_happens_during_startup() -> None:
    kills = [Kill(place="start", step=1, share=0.25), Kill(place="start", step=1, share=0.5)]
    assert due_at(kills, []) == 11.0
    assert due_at(kills, [event("kill", 20.0, number=0)]) == 22.0
    assert due_at(kills, [event("kill", 20.0, number=0), event("kill", 22.0, number=1)]) is None


@pytest.fixture
def below() -> Iterator[psutil.Process]:
    """A child process."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield psutil.Process(process.pid)
    process.communicate(b"\n", timeout=300)


@pytest.mark.parametrize(
    ("who", "module"), [("launcher", "train.elastic.agent"), ("server", "pipeline.system.fork_server")]
)
def test_agent_and_fork_server_are_found_by_their_modules(
    who: Literal["launcher", "server"], module: str, below: psutil.Process
) -> None:
    born = [event("born", 1.0, rank=0, pid=1, parent=below.pid)]
    waits = "print(flush=True); input()"
    program = [sys.executable, "-c", waits, "-m", module]
    other = [sys.executable, "-c", waits, module]  # the fork server's command names the agent as well
    with (
        subprocess.Popen(other, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as mentions,
        subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as named,
    ):
        for process in (mentions, named):  # until then it has the command of this process
            assert process.stdout is not None
            process.stdout.readline()
        descendants = [below, psutil.Process(mentions.pid), psutil.Process(named.pid)]
        victim = choose_victim(Kill(place="moment", step=1, who=who), born, psutil.Process(), descendants)
        assert victim is not None
        assert victim.pid == named.pid
        for process in (mentions, named):
            process.communicate(b"\n", timeout=300)


def test_victim_is_the_newest_process_of_the_rank_or_its_parent(below: psutil.Process) -> None:
    pipe = psutil.Process()
    born = [event("born", 1.0, rank=1, pid=1), event("born", 2.0, rank=1, pid=below.pid, parent=1)]
    born.append(event("born", 2.0, rank=0, pid=1, parent=below.pid))
    assert choose_victim(Kill(place="moment", step=1, rank=1), born, pipe, [below]) == below
    assert choose_victim(Kill(place="moment", step=1, who="launcher"), born, pipe, [below]) == below
    assert choose_victim(Kill(place="moment", step=1, who="pipe"), born, pipe, [below]) == pipe
    assert choose_victim(Kill(place="start", step=1), born, pipe, [below]) == below


def test_only_descendants_are_killed(below: psutil.Process) -> None:
    born = [event("born", 1.0, rank=0, pid=os.getppid(), parent=1)]
    for kill in (Kill(place="moment", step=1), Kill(place="moment", step=1, who="launcher")):
        assert choose_victim(kill, born, psutil.Process(), [below]) is None
    assert choose_victim(Kill(place="start", step=1), born, psutil.Process(), []) is None
