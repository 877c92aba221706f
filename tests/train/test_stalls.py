from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from train.stalls import Stalls
from train.standstill import Doing, Report, Standstill

HUNG = Report(1, "b", 42, 0.0, 9, 4, "data", Doing.USERS_CODE, "task.py, line 7, data", 30.04, "", "its stacks\n")
WAITS = replace(HUNG, rank=0, host="a", doing=Doing.WAITING, exchanges="gloo:all_reduce, no. 3, of [2] Float")
FOUND = Standstill([WAITS, HUNG], [HUNG])


def test_a_report_begins_with_the_sentence_and_has_a_section_for_each_process(tmp_path: Path) -> None:
    path = Stalls(tmp_path / "stalls").write(FOUND, lambda one: f"more of {one.rank}")
    first, waits, hung = path.read_text().split("== ")
    assert first.startswith("rank 1 on b (process 42) has not moved for 30 s from step 4, data")
    assert waits.splitlines()[0] == "rank 0 on a (process 42), still for 30.0 s"
    assert "unfinished: gloo:all_reduce, no. 3, of [2] Float" in waits
    assert hung.splitlines() == [
        "rank 1 on b (process 42), still for 30.0 s  <- waited for",
        "at step 4, data",
        "place: task.py, line 7, data",
        "more of 1",
        "its stacks",
        "",
    ]


def test_processes_of_one_launch_leave_one_report_and_those_of_the_next_another(tmp_path: Path) -> None:
    first, second = Stalls(tmp_path), Stalls(tmp_path)
    assert first.write(FOUND, lambda _: "seen by the first") == tmp_path / "1.txt"
    assert second.write(FOUND, lambda _: "seen by the second") == tmp_path / "1.txt"
    assert "seen by the first" in (tmp_path / "1.txt").read_text()
    assert Stalls(tmp_path).write(FOUND, lambda _: "") == tmp_path / "2.txt"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.txt", "2.txt"]
