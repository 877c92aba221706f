from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.spec.errors import PipelineError
from pipeline.spec.registry import CHAMPION, PREVIOUS, Entry, Registry, read_registry, write_registry


def entry(name: str) -> Entry:
    return Entry(bundle=f"bundle-{name}", checkpoint=f"checkpoint-{name}", path=f"{name}/export/bundle")


def crowned(*names: str) -> Registry:
    registry = Registry()
    for name in names:
        registry = registry.assign(CHAMPION, entry(name), "deployed")
    return registry


def test_without_a_champion_there_is_nobody_to_beat() -> None:
    assert Registry().champion_for("checkpoint-a") is None
    assert Registry().assign("canary", entry("a"), "trial").champion_for(None) is None


def test_a_candidate_must_beat_the_champion() -> None:
    assert crowned("a", "b").champion_for("checkpoint-c") == entry("b")
    assert crowned("a", "b").champion_for(None) == entry("b")


def test_the_champion_itself_must_beat_the_one_before() -> None:
    assert crowned("a", "b").champion_for("checkpoint-b") == entry("a")


def test_the_only_champion_there_ever_was_has_nobody_to_beat() -> None:
    assert crowned("a").champion_for("checkpoint-a") is None


def test_a_champion_that_came_back_must_beat_the_one_it_replaced() -> None:
    assert crowned("a", "b", "a").champion_for("checkpoint-a") == entry("b")


def test_the_replaced_champion_is_kept_as_previous() -> None:
    assert crowned("a", "b").names == {CHAMPION: entry("b"), PREVIOUS: entry("a")}
    assert PREVIOUS not in crowned("a").names


def test_giving_a_name_to_its_owner_changes_nothing() -> None:
    registry = crowned("a", "b")
    assert registry.assign(CHAMPION, entry("b"), "again") is registry


def test_other_names_come_and_go_without_a_previous() -> None:
    registry = crowned("a").assign("canary", entry("b"), "x").assign("canary", entry("c"), "y")
    assert registry.names == {CHAMPION: entry("a"), "canary": entry("c")}


def test_history_remembers_every_change_in_order() -> None:
    changes = crowned("a", "b", "a").history
    assert [(change.name, change.entry, change.reason) for change in changes] == [
        (CHAMPION, entry(name), "deployed") for name in ("a", "b", "a")
    ]


def test_assigning_leaves_the_registry_at_hand_as_it_was() -> None:
    registry = crowned("a")
    registry.assign(CHAMPION, entry("b"), "x")
    assert registry.names[CHAMPION] == entry("a")


def test_a_registry_survives_the_file(tmp_path: Path) -> None:
    assert read_registry(tmp_path) == Registry()
    write_registry(tmp_path, crowned("a", "b"))
    assert read_registry(tmp_path) == crowned("a", "b").model_copy(update={"history": read_registry(tmp_path).history})
    assert [change.entry for change in read_registry(tmp_path).history] == [entry("a"), entry("b")]


@pytest.mark.parametrize("text", ["", "{", '{"names": {"champion": 1}}', '{"nmaes": {}}'])
def test_a_damaged_registry_is_refused_by_its_path(tmp_path: Path, text: str) -> None:
    (tmp_path / "registry.json").write_text(text)
    with pytest.raises(PipelineError, match=r"registry\.json: damaged"):
        read_registry(tmp_path)
