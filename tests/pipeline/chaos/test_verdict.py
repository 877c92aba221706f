from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.chaos.verdict import Made, Training, Verdict, made, rows
from train.chaos_hooks import ChaosEvent, Kill

KILLS = (
    Kill(place="step", step=1),
    Kill(place="moment", who="launcher", step=2),
    Kill(place="start", step=2),
    Kill(place="renamed", step=8),
)
HELD = Training(
    run="runs/one",
    made=(Made("at a step's end", 1, 2.0), Made("at a step's end", 2, 4.0), Made("while processes start", 2, None)),
    by_hand=0,
    fault="",
    lost=0,
    repeated=0,
    ledger="",
    weights="abc",
    differs="",
)


def killed(number: int, time: float) -> ChaosEvent:
    return ChaosEvent(event="kill", time=time, number=number)


def stepped(born: float, time: float) -> ChaosEvent:
    return ChaosEvent(event="step", time=time, born=born)


def test_a_kill_is_recovered_from_by_the_first_step_of_processes_born_after_it() -> None:
    events = [
        stepped(0.0, 1.0),
        killed(0, 1.5),
        stepped(0.0, 1.6),
        stepped(3.0, 4.0),
        killed(1, 5.0),
        stepped(6.0, 7.5),
    ]
    assert [one.seconds for one in made(KILLS, events, None)] == [2.5, 2.5]


def test_a_kill_that_the_next_one_overtook_has_no_time_own() -> None:
    events = [killed(0, 1.0), stepped(2.0, 3.0), killed(1, 4.0), killed(2, 5.0), stepped(6.0, 7.0), killed(3, 8.0)]
    assert [one.seconds for one in made(KILLS, events, 8.5)] == [2.0, None, 2.0, 0.5]
    assert [one.place for one in made(KILLS, events, 8.5)] == [
        "at a step's end", "at any moment: launcher", "while processes start", "after a checkpoint's rename",
    ]  # fmt: skip


def test_the_table_has_a_row_for_every_kind_of_place() -> None:
    found = rows([HELD, HELD])
    assert [(row.place, row.kills, row.recoveries, row.p50_seconds, row.max_seconds) for row in found] == [
        ("at a step's end", 4, 4, 3.0, 4.0),
        ("while processes start", 2, 2, None, None),
    ]


def test_the_kill_that_training_did_not_come_back_from_is_no_recovery() -> None:
    found = rows([replace(HELD, fault="training stands still")])
    assert {row.place: row.kills - row.recoveries for row in found} == {
        "at a step's end": 0,
        "while processes start": 1,
    }


def test_it_holds_when_nothing_was_lost_and_the_weights_are_equal() -> None:
    verdict = Verdict(3, 8, 2, (HELD,))
    assert verdict.held
    assert verdict.text().splitlines()[-1].startswith("held: 3 kills in a training of 8 steps on 2 processes; ")
    assert verdict.table()[-1] == {"place": "all", "kills": 3, "recoveries": 3, "p50 s": 3.0, "max s": 4.0}
    assert {name: verdict.as_json()[name] for name in ("held", "kills", "lost", "repeated", "equal")} == {
        "held": True, "kills": 3, "lost": 0, "repeated": 0, "equal": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"lost": 3, "repeated": 1}, "3 samples were lost and 1 repeated"),
        ({"differs": "the final weights differ"}, "the final weights differ"),
        ({"ledger": "line 4: a second line of step 3"}, "line 4: a second line of step 3"),
        ({"by_hand": 2}, "training had to be resumed by hand 2 times"),
        ({"fault": "training stands still"}, "training stands still"),
        ({"made": ()}, "3 of the kills were not made"),
    ],
)
def test_whatever_does_not_hold_is_stated_and_where_to_look(changes: dict[str, object], told: str) -> None:
    verdict = Verdict(3, 8, 2, (replace(HELD, **changes),))  # type: ignore[arg-type]
    assert not verdict.held
    assert verdict.sentence() == f"did NOT hold: {told}"
    assert ("pipe verify runs/one" in verdict.text()) == ("made" not in changes)
