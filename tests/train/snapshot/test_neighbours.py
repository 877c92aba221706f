from __future__ import annotations

from train.snapshot.neighbours import Neighbours


def test_each_part_is_kept_on_the_next_machine_by_the_process_of_the_same_place() -> None:
    machines = ["a", "a", "b", "b", "c", "c"]
    assert [Neighbours(machines, 0).keeper(rank) for rank in range(6)] == [2, 3, 4, 5, 0, 1]
    assert Neighbours(machines, 2).wards == [0]


def test_where_machines_are_unequal_some_keep_several_parts() -> None:
    machines = ["a", "a", "a", "b"]
    assert [Neighbours(machines, 0).keeper(rank) for rank in range(4)] == [3, 3, 3, 0]
    assert Neighbours(machines, 3).wards == [0, 1, 2]
    assert Neighbours(machines, 0).wards == [3]
    assert Neighbours(machines, 1).wards == []


def test_one_machine_alone_has_nobody_to_keep_its_parts() -> None:
    alone = Neighbours(["a", "a"], 1)
    assert alone.keeper(0) is None
    assert alone.wards == []


def test_the_first_process_of_a_machine_leads_there() -> None:
    machines = ["a", "b", "a", "b"]
    assert [Neighbours(machines, rank).leads for rank in range(4)] == [True, True, False, False]
    assert Neighbours(machines, 2).here == [0, 2]
    assert Neighbours(machines, 2).leaders == [0, 1]
