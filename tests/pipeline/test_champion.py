from __future__ import annotations

import pytest

from pipeline.champion import promote, rollback
from pipeline.spec.errors import ConfigError
from pipeline.spec.registry import CHAMPION, PREVIOUS, read_registry
from pipeline.spec.run import Run

from .conftest import NewRun, bundle_of


def champion(run: Run) -> str:
    return read_registry(run.runs, "").names[CHAMPION].bundle


def test_what_serves_is_what_the_next_candidate_has_to_beat(new_run: NewRun) -> None:
    run = new_run()
    promote(run, bundle_of(run, "one"))
    entry = read_registry(run.runs, "").names[CHAMPION]
    assert (entry.bundle, entry.checkpoint, entry.path) == ("one", "checkpoint of one", f"{run.id}/export/bundle")
    assert read_registry(run.runs, "").history[-1].reason == f"deployed by run {run.id}"


def test_the_one_it_replaces_is_remembered(new_run: NewRun) -> None:
    run = new_run()
    for digest in ("one", "two"):
        promote(run, bundle_of(run, digest))
    assert champion(run) == "two"
    assert read_registry(run.runs, "").names[PREVIOUS].bundle == "one"


def test_the_same_bundle_in_a_later_run_changes_nothing(new_run: NewRun) -> None:
    first, later = new_run(), new_run()
    promote(first, bundle_of(first, "one"))
    before = read_registry(first.runs, "")
    promote(later, bundle_of(later, "one"))
    assert read_registry(first.runs, "") == before


def test_going_back_exchanges_champion_and_previous(new_run: NewRun) -> None:
    run = new_run()
    for digest in ("one", "two"):
        promote(run, bundle_of(run, digest))
    assert rollback(run.runs, "").bundle == champion(run) == "one"
    assert rollback(run.runs, "").bundle == champion(run) == "two"
    assert [change.reason for change in read_registry(run.runs, "").history][-1] == "rolled back"


def test_without_a_previous_one_there_is_nothing_to_go_back_to(new_run: NewRun) -> None:
    with pytest.raises(ConfigError, match="no previous champion"):
        rollback(new_run().runs, "")


def test_a_name_of_ones_own_has_a_history_of_its_own(new_run: NewRun) -> None:
    run = new_run()
    for digest in ("one", "two"):
        promote(run, bundle_of(run, digest), "tried", name="staging")
    assert read_registry(run.runs, "").names["staging"].bundle == "two"
    assert CHAMPION not in read_registry(run.runs, "").names
    assert rollback(run.runs, "", "staging", "too slow").bundle == "one"
    assert [change.reason for change in read_registry(run.runs, "").history][-1] == "too slow"


def test_previous_follows_from_the_history_and_is_given_by_nobody(new_run: NewRun) -> None:
    run = new_run()
    with pytest.raises(ConfigError, match="previous follows from the history"):
        promote(run, bundle_of(run, "one"), name=PREVIOUS)
