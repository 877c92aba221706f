from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.chaos.verdict import KillResult, Training, Verdict, kill_results, recovery_rows
from pipeline.contract.chaos import ChaosEvent, Kill

KILLS = (
    Kill(place="step", step=1),
    Kill(place="moment", who="launcher", step=2),
    Kill(place="start", step=2),
    Kill(place="renamed", step=8),
)
HELD = Training(
    run="runs/one",
    made=(
        KillResult("at a step's end", 1, 2.0),
        KillResult("at a step's end", 2, 4.0),
        KillResult("while processes start", 2, None),
    ),
    by_hand=(),
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


def test_recovery_ends_with_the_first_step_of_new_processes() -> None:
    events = [
        stepped(0.0, 1.0),
        killed(0, 1.5),
        stepped(0.0, 1.6),
        stepped(3.0, 4.0),
        killed(1, 5.0),
        stepped(6.0, 7.5),
    ]
    assert [one.seconds for one in kill_results(KILLS, events, None)] == [2.5, 2.5]


def test_overtaken_kill_has_no_recovery_time() -> None:
    events = [killed(0, 1.0), stepped(2.0, 3.0), killed(1, 4.0), killed(2, 5.0), stepped(6.0, 7.0), killed(3, 8.0)]
    assert [one.seconds for one in kill_results(KILLS, events, 8.5)] == [2.0, None, 2.0, 0.5]
    assert [one.place for one in kill_results(KILLS, events, 8.5)] == [
        "at a step's end", "at any moment: launcher", "while processes start", "after a checkpoint's rename",
    ]  # fmt: skip


def test_table_has_a_row_per_kind_of_place() -> None:
    found = recovery_rows([HELD, HELD])
    assert [tuple(row.values()) for row in found] == [
        ("at a step's end", 4, 4, 3.0, 4.0),
        ("while processes start", 2, 2, None, None),
    ]


def test_unfinished_training_is_no_recovery() -> None:
    found = recovery_rows([replace(HELD, fault="training has hung")])
    assert {row["place"]: row["kills"] - row["recoveries"] for row in found} == {
        "at a step's end": 0,
        "while processes start": 1,
    }


def test_verdict_holds_without_loss_and_with_equal_weights() -> None:
    verdict = Verdict(3, 8, 2, (HELD,))
    assert verdict.held
    assert verdict.text().splitlines()[-1].startswith("held: 3 kills in a training of 8 steps on 2 processes; ")
    assert verdict.table()[-1] == {"place": "all", "kills": 3, "recoveries": 3, "p50 s": 3.0, "max s": 4.0}
    assert {name: verdict.as_json()[name] for name in ("held", "kills", "lost", "repeated", "equal")} == {
        "held": True, "kills": 3, "lost": 0, "repeated": 0, "equal": True,
    }  # fmt: skip


def test_lost_best_checkpoint_is_named_where_weights_are_called_equal() -> None:
    verdict = Verdict(3, 8, 2, (replace(HELD, lost_best=4),))
    named = ", except that the best checkpoint, of step 4, was damaged"
    assert verdict.held
    assert verdict.sentence() == Verdict(3, 8, 2, (HELD,)).sentence() + named
    assert f"final weights     equal{named}" in verdict.text().splitlines()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"lost": 3, "repeated": 1}, "3 samples were lost and 1 repeated"),
        ({"differs": "the final weights differ"}, "the final weights differ"),
        ({"ledger": "line 4: a second line of step 3"}, "line 4: a second line of step 3"),
        ({"by_hand": ("no disk", "no disk")}, "training had to be resumed by hand 2 times: no disk"),
        ({"fault": "training has hung"}, "training has hung"),
        ({"made": ()}, "3 of the kills were not made"),
    ],
)
def test_failed_verdict_names_the_problem(changes: dict[str, object], problem: str) -> None:
    verdict = Verdict(3, 8, 2, (replace(HELD, **changes),))  # type: ignore[arg-type]
    assert not verdict.held
    assert verdict.sentence() == f"did NOT hold: {problem}"
    assert ("pipe verify runs/one" in verdict.text()) == ("made" not in changes)
